"""What a stage is apart from exact: recompute, random weights, memory, and what is refused."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests.inprocess.hf_models import (
    CONFIGS,
    GPT2_SIZES,
    HEADS,
    OPT,
    SIZES,
    StageCache,
    backward,
    gradients,
    make_batch,
    parameters_of,
    run,
    save_checkpoint,
)
from tools.tiny_configs import REFUSED as REFUSED_CONFIGS
from zorse_ds.errors import DataError, ModelError
from zorse_ds.integrations.huggingface import CausalLMStage, CausalLMStages
from zorse_ds.ranges import Range

CUT = [(0, 2), (2, 4), (4, 5)]


def train_step(pipeline: list[CausalLMStage], frozen_layers: int) -> dict[str, torch.Tensor]:
    """Gradients with dropout on and the first layers frozen."""
    for stage in pipeline:
        stage.train().zero_grad(set_to_none=True)
        for name, parameter in stage.global_parameters():
            parameter.requires_grad_(stage.layer_of(name) >= frozen_layers)
    torch.manual_seed(7)
    backward(run(pipeline, make_batch("padded")))
    return gradients(parameters_of(pipeline))


@pytest.mark.parametrize("cut", [[(0, 5)], CUT])
@pytest.mark.parametrize("frozen_layers", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2_untied"])
@pytest.mark.parametrize("recomputed", [Range(0, 5), Range(2, 3)], ids=str)
def test_recompute_is_exact(
    recomputed: Range, name: str, frozen_layers: int, cut: list[tuple[int, int]], tmp_path: Path
) -> None:
    save_checkpoint(CONFIGS[name](), tmp_path)
    stages = CausalLMStages.from_folder(tmp_path, dtype=torch.float64)
    plain = StageCache(stages).pipeline(cut)
    again = StageCache(stages, recomputed=recomputed).pipeline(cut)
    expected, found = train_step(plain, frozen_layers), train_step(again, frozen_layers)
    assert found.keys() == expected.keys()
    assert {plain[0].layer_of(key) for key in found} == set(range(frozen_layers, 5))
    assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize(
    ("recomputed", "number"),
    [(Range(0, 3), 2), (Range(0, 2), 1), (Range(2, 3), 1), (Range(0, 1), 0), (Range(0, 0), 0)],
    ids=str,
)
def test_recompute_runs_blocks_twice(recomputed: Range, number: int) -> None:
    stage = CausalLMStages.from_config(CONFIGS["llama"]()).build(0, 3, recomputed=recomputed)
    calls = []
    for block in stage.model.model.layers[:2]:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    hidden, _, _ = stage(make_batch())
    assert len(calls) == 2
    hidden.sum().backward()
    assert len(calls) == 2 + number


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "gpt2_untied", "opt_projected"])
def test_random_weights_do_not_depend_on_the_cut(name: str) -> None:
    stages = CausalLMStages.from_config(CONFIGS[name](), seed=11)
    state = torch.get_rng_state()
    whole = dict(stages.build(0, 5).global_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    for cut in (CUT, [(0, 1), (1, 5)], [(0, 4), (4, 5)]):
        for layers in cut:
            for key, parameter in stages.build(*layers).global_parameters():
                assert torch.equal(parameter, whole[key]), (key, layers)
    other = dict(
        CausalLMStages.from_config(CONFIGS[name](), seed=12).build(0, 5).global_parameters()
    )
    matrices = [key for key in whole if whole[key].ndim == 2]
    assert not any(torch.equal(whole[key], other[key]) for key in matrices)
    blocks = [key for key in matrices if stages.structure.layer_of(key) == 1]
    twins = [key.replace(".0.", ".1.") for key in blocks]
    assert not any(torch.equal(whole[a], whole[b]) for a, b in zip(blocks, twins, strict=True))


def test_tied_weights_do_not_depend_on_what_is_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage with the head draws the tied embeddings without the positions before them."""
    model = hf.models.gpt2.modeling_gpt2.GPT2Model
    original = model.__init__

    def positions_first(self: nn.Module, config: Any) -> None:
        original(self, config)
        self._modules = {"wpe": self._modules.pop("wpe"), **self._modules}

    monkeypatch.setattr(model, "__init__", positions_first)
    stages = CausalLMStages.from_config(CONFIGS["gpt2"]())
    assert stages.layer_names[0] == "transformer.wpe+transformer.wte"
    first, last = stages.build(0, 1), stages.build(4, 5)
    for key, parameter in last.tied_parameters().items():
        assert torch.equal(parameter, dict(first.global_parameters())[key])


@pytest.mark.parametrize("name", ["llama3_rope", "gpt2", "gemma3", "mamba"])
def test_random_weights_are_spread_as_the_model_wants(name: str) -> None:
    config = CONFIGS[name]()
    whole = CausalLMStages.from_config(config, seed=1).build(0, 5).eval()
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    ours = dict(whole.global_parameters())
    for key, parameter in model.named_parameters():
        if parameter.numel() > 500:
            torch.testing.assert_close(ours[key].std(), parameter.std(), rtol=0.2, atol=1e-6)
        elif parameter.ndim == 1 and parameter.std() == 0:
            assert torch.equal(ours[key], parameter)
    model.load_state_dict(whole.model.state_dict())
    batch = make_batch()
    assert torch.equal(whole(batch), model(**batch, use_cache=False).logits)


def test_stages_free_their_activations_at_once() -> None:
    """The way out of the model's forward leaves no cycle that holds hidden states."""
    stage = CausalLMStages.from_config(CONFIGS["llama"]()).build(0, 3)
    freed: list[Any] = []
    block = stage.model.model.layers[0]
    block.register_forward_hook(lambda _m, _a, output: freed.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        value = stage(make_batch())
        assert freed[0]() is not None
        del value
        assert freed[0]() is None
    finally:
        gc.enable()


def test_middle_stages_pass_masks_on() -> None:
    stages = CausalLMStages.from_config(CONFIGS["llama"]())
    batch = make_batch("padded")
    hidden, mask, positions = stages.build(0, 1)(batch)
    assert hidden.shape == (2, 7, 16)
    assert mask is batch["attention_mask"]
    assert positions is None
    assert stages.build(1, 2)((hidden, mask, positions))[1] is mask


def test_rotary_embeddings_follow_the_weights_not_the_message() -> None:
    """Hidden states sent in fewer bits must not coarsen what the stage computes by itself."""
    stage = CausalLMStages.from_config(CONFIGS["llama"]()).build(2, 3)
    dtypes = []

    def note(_block: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        dtypes.append(kwargs["position_embeddings"][0].dtype)

    stage.model.model.layers[1].register_forward_pre_hook(note, with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16):
        stage((torch.randn(2, 7, 16, dtype=torch.bfloat16), None, None))
    assert dtypes == [torch.float32]


def test_dropout_follows_the_mode() -> None:
    stage = CausalLMStages.from_config(CONFIGS["gpt2"]()).build(0, 5)
    batch = make_batch()
    assert not torch.equal(stage(batch), stage(batch))
    assert torch.equal(stage.eval()(batch), stage(batch))


def test_refuses_what_a_batch_may_not_hold() -> None:
    stage = CausalLMStages.from_config(CONFIGS["llama"]()).build(0, 2)
    ids = make_batch()["input_ids"]
    for batch in ({"input_ids": ids, "labels": ids}, {"attention_mask": ids}):
        with pytest.raises(DataError, match="expected input_ids"):
            stage(batch)
    mamba = CausalLMStages.from_config(CONFIGS["mamba"]()).build(0, 2)
    with pytest.raises(DataError, match="position_ids, which MambaForCausalLM does not take"):
        mamba({"input_ids": ids, "position_ids": ids})


@pytest.mark.parametrize("layers", [(0, 0), (3, 2), (-1, 2), (0, 6), (5, 6)])
def test_refuses_ranges_outside_the_model(layers: tuple[int, int]) -> None:
    with pytest.raises(ModelError, match=r"expected a non-empty range within \[0, 5\)"):
        CausalLMStages.from_config(CONFIGS["llama"]()).build(*layers)


ZAMBA2 = {
    "mamba_d_state": 4,
    "n_mamba_heads": 4,
    "mamba_ngroups": 1,
    "layer_types": ["mamba", "hybrid", "mamba"],
    "num_mem_blocks": 1,
    "chunk_size": 4,
    "attention_hidden_size": 32,
    "attention_head_dim": 8,
}
REFUSED = {
    "per-layer embeddings": (REFUSED_CONFIGS["gemma3n"], "hidden_size_per_layer_input is 4"),
    "both": (REFUSED_CONFIGS["gemma4_per_layer"], "hidden_size_per_layer_input is 4"),
    "shared keys": (REFUSED_CONFIGS["gemma4_shared_keys"], "its last 1 blocks use keys"),
    "embeddings in each block": (lambda: hf.Zamba2Config(**SIZES, **ZAMBA2), "argument 1, which"),
    "blocks left out": (lambda: hf.OPTConfig(**OPT, **HEADS, layerdrop=0.1), "layerdrop"),
    "no list of blocks": (lambda: hf.OpenAIGPTConfig(**GPT2_SIZES), "0 lists"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_models_it_would_cut_wrongly(case: str) -> None:
    config, reason = REFUSED[case]
    with pytest.raises(ModelError, match=f"cannot be cut into stages: .*{reason}.*; expected"):
        CausalLMStages.from_config(config())


def patched(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Have LlamaModel hand `change(kwargs)` to each of its blocks."""
    model = hf.models.llama.modeling_llama.LlamaModel
    forward = model.forward

    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs, **change(kwargs))

    monkeypatch.setattr(model, "forward", changed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: {"shared": {}}, "argument shared, a dict"),
        (lambda _: {"shared": []}, "argument shared, a list"),
        (lambda kwargs: {"ids": kwargs["input_ids"]}, "argument ids, which a later stage cannot"),
    ],
)
def test_refuses_side_channels_between_blocks(
    change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch, change)
    with pytest.raises(ModelError, match=reason):
        CausalLMStages.from_config(CONFIGS["llama"]())
