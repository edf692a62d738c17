"""Finding out, without weights or compute, how a model is laid out, or why it cannot be cut.

The model is built on the meta device, its blocks and parts are replaced by recorders, and its own
forward runs a few tokens: as the whole model would, and then as a later stage would. What a later
stage could not know of (ids, embeddings, earlier blocks) must not differ between the two.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface.layout import find_blocks, find_parts, find_ties, keep_ties
from zorse_ds.integrations.huggingface.probe_checks import (
    chain_is_broken,
    check_alike,
    check_chain,
    check_logits,
    check_order,
    sort_parts,
)
from zorse_ds.integrations.huggingface.prune import Stub, replace_module
from zorse_ds.integrations.huggingface.recorders import (
    BlockRecorder,
    PartRecorder,
    Recorder,
    Recording,
    RefusalError,
)
from zorse_ds.integrations.huggingface.router_probe import find_router_loss, without_router_loss
from zorse_ds.integrations.huggingface.structure import ModelStructure

OPTIONAL_INPUTS = ("attention_mask", "position_ids")

Inputs = Mapping[str, torch.Tensor]


def probe(model: PreTrainedModel) -> ModelStructure:
    """Find the structure of `model`, which is on the meta device and is used up by this.

    Raises ModelError with the reason when the model is not understood well enough to be cut.
    """
    try:
        with torch.enable_grad():
            return _probe(model.eval())
    except RefusalError as refusal:
        raise _refusal(model, str(refusal)) from None
    except Exception as problem:  # a model whose own code fails when probed is refused as well
        reason = f"running it without its weights fails ({type(problem).__name__}: {problem})"
        raise _refusal(model, reason) from problem


def _refusal(model: PreTrainedModel, reason: str) -> ModelError:
    """The error for a model that is not understood."""
    return ModelError(
        f"{type(model).__name__} cannot be cut into stages: {reason}; expected decoder blocks that "
        "hand on one hidden state and depend on nothing else from before them"
    )


def _probe(model: PreTrainedModel) -> ModelStructure:
    """The passes of `probe`; raises RefusalError."""
    _refuse_options(model)
    router_loss = find_router_loss(model)
    without_router_loss(model.config)
    blocks_path = find_blocks(model)
    part_paths = find_parts(model, blocks_path)
    ties = find_ties(model)
    parameter_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    recorder, num_blocks = _install_recorders(model, blocks_path, part_paths)
    structure = ModelStructure(
        model_class=type(model),
        blocks_path=blocks_path,
        num_blocks=num_blocks,
        hidden_argument=0,
        blocks_return_tuple=_blocks_return_tuple(model, recorder),
        parts_before=(),
        parts_after=(),
        identity_parts=frozenset(),
        ties=(),
        accepted_inputs=_accepted_inputs(model),
        router_loss=router_loss,
    )
    structure = _compare_runs(model, recorder, structure, part_paths)
    return replace(structure, ties=keep_ties(structure, ties, parameter_names))


def _compare_runs(
    model: PreTrainedModel, recorder: Recorder, structure: ModelStructure, part_paths: list[str]
) -> ModelStructure:
    """Run as the whole model and as a later stage, check, and fill in what the runs tell."""
    as_tuple = structure.blocks_return_tuple
    options = list(_optional_inputs(structure.accepted_inputs))
    whole = [_run(model, recorder, {"input_ids": _ids(), **o}, as_tuple) for o in options]
    for recording, logits in whole:
        check_order(recording, structure.num_blocks)
        check_chain(recording)
        check_logits(recording, logits)
    before, after, identity = sort_parts([recording for recording, _ in whole], part_paths)
    for path in before:
        stub = Stub(model.get_submodule(path), is_identity=path in identity)
        replace_module(model, path, stub)
    first = whole[0][0].blocks[0]
    stand_in = {"inputs_embeds": torch.zeros_like(first.hidden)}
    for (recording, logits), option in zip(whole, options, strict=True):
        later, later_logits = _run(model, recorder, {**stand_in, **option}, as_tuple)
        check_alike(recording, later)
        if not torch.equal(logits, later_logits):
            raise RefusalError("its head needs token ids or embeddings besides the hidden state")
    return replace(
        structure,
        hidden_argument=first.hidden_argument,
        parts_before=before,
        parts_after=after,
        identity_parts=identity,
    )


def _refuse_options(model: PreTrainedModel) -> None:
    """Options under which stages would train something else than the whole model does."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "layerdrop", None):
        raise RefusalError("layerdrop skips blocks at random, which stages cannot agree on")
    if getattr(config, "hidden_size_per_layer_input", None):
        raise RefusalError(
            "every block gets an embedding of the tokens besides its hidden state "
            f"(hidden_size_per_layer_input is {config.hidden_size_per_layer_input})"
        )
    if _shares_keys(model):
        raise RefusalError(
            f"its last {config.num_kv_shared_layers} blocks use keys and values of earlier ones "
            "(num_kv_shared_layers)"
        )


def _shares_keys(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config(decoder=True)
    return bool(getattr(config, "num_kv_shared_layers", None))


def _install_recorders(
    model: PreTrainedModel, blocks_path: str, part_paths: list[str]
) -> tuple[Recorder, int]:
    """Replace blocks and parts, and give the buffers that are left some numbers."""
    recorder = Recorder(shares_keys=_shares_keys(model))
    blocks = model.get_submodule(blocks_path)
    assert isinstance(blocks, nn.ModuleList)
    for i, block in enumerate(blocks):
        blocks[i] = BlockRecorder(i, block, recorder)
    for path in part_paths:
        replace_module(model, path, PartRecorder(path, model.get_submodule(path), recorder))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = _numbers_like(buffer)
    return recorder, len(blocks)


def _numbers_like(buffer: torch.Tensor) -> torch.Tensor:
    """Unequal numbers on the CPU, so that what is computed from a buffer shows its arguments."""
    if not buffer.is_floating_point():
        return torch.zeros(buffer.shape, dtype=buffer.dtype)
    numbers = torch.linspace(0.1, 1, buffer.numel(), device="cpu")
    return numbers.reshape(buffer.shape).to(buffer.dtype)


def _accepted_inputs(model: PreTrainedModel) -> frozenset[str]:
    """Those of the optional inputs the forward has an argument for."""
    return frozenset(OPTIONAL_INPUTS).intersection(inspect.signature(model.forward).parameters)


def _blocks_return_tuple(model: PreTrainedModel, recorder: Recorder) -> bool:
    """Whether the forward unpacks what a block returns, found by trying."""
    failures = []
    for as_tuple in (False, True):
        try:
            recording, logits = _run(model, recorder, {"input_ids": _ids()}, as_tuple)
        except Exception as problem:  # the wrong form makes the model's code fail in its own ways
            failures.append(problem)
        else:
            if not chain_is_broken(recording, logits):
                return as_tuple
    if len(failures) == 2:
        raise failures[0]
    raise RefusalError("its blocks are not given what the block before returned")


def _run(
    model: PreTrainedModel, recorder: Recorder, inputs: Inputs, as_tuple: bool
) -> tuple[Recording, torch.Tensor]:
    """One recorded forward; its calls and its logits."""
    recorder.recording = Recording(blocks_return_tuple=as_tuple)
    output = model(**inputs, use_cache=False, return_dict=True)
    return recorder.recording, output.logits


def _ids() -> torch.Tensor:
    """Two rows of six token ids."""
    return torch.tensor([[1, 2, 3, 4, 5, 6], [3, 1, 4, 1, 5, 2]])


def _optional_inputs(accepted: frozenset[str]) -> Iterator[dict[str, torch.Tensor]]:
    """No optional input; padding on either side; two documents packed in a row."""
    yield {}
    if "attention_mask" in accepted:
        yield {"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])}
    if "position_ids" in accepted:
        yield {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])}
