"""One pipeline stage of a causal language model: a pruned model and its entrance and exit."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from zorse_ds.core.recompute import KEPT
from zorse_ds.errors import DataError
from zorse_ds.integrations.huggingface.prune import StageExit
from zorse_ds.integrations.huggingface.router_loss import RouterSums
from zorse_ds.integrations.huggingface.structure import ModelStructure
from zorse_ds.ranges import Range

INPUT_NAMES = ("input_ids", "attention_mask", "position_ids")

StageValue = tuple[torch.Tensor | None, ...]
"""What travels between stages: hidden state (b, t, h), attention_mask (b, t), position_ids, and
behind these, with a router loss, its sums so far (b, 1, width)."""


class CausalLMStage(nn.Module):
    """Pipeline layers [start, stop) of a causal language model.

    `model` is the Hugging Face model with everything else taken out. Hidden states of an earlier
    stage enter at the first local block, never as `inputs_embeds`: what the model does between
    its embeddings and its first block (scaling them, say) has been done already.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: ModelStructure,
        start: int,
        stop: int,
        *,
        recomputed: Range = KEPT.layers,
    ) -> None:
        super().__init__()
        self.model = model
        self.structure = structure
        self.start = start
        self.stop = stop
        self._received: torch.Tensor | None = None
        self._install_entrance()
        self._install_exit()
        loss = structure.router_loss
        self._routers = None if loss is None else RouterSums(loss, self._blocks())
        self._recompute_blocks(recomputed)
        self.train()

    @property
    def is_first(self) -> bool:
        """Whether the stage holds the embeddings, and takes a batch."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage holds the head, and returns logits."""
        return self.stop == self.structure.num_layers

    def forward(self, value: dict[str, torch.Tensor] | StageValue) -> StageValue | torch.Tensor:
        """Run the local layers on one micro-batch.

        First stage: `value` is a dict with input_ids (b, t) and, where wanted, attention_mask
        (b, t) and position_ids (b or 1, t). Other stages: the tuple the stage before returned:
        hidden state (b, t, h), attention_mask or None, position_ids or None, and the sums of a
        router loss where the model has one. Returns such a tuple, or from the stage with the last
        layer the logits (b, t, vocabulary), with a router loss `(logits, sums)`. Raises DataError
        for an input the model does not take.
        """
        sums: Sequence[torch.Tensor] = ()
        if isinstance(value, dict):
            self._check_batch(value)
            inputs = {"input_ids": value["input_ids"]}
            mask, positions = value.get("attention_mask"), value.get("position_ids")
        else:
            assert not self.is_first, "the first stage takes a dict"
            parts: Any = value
            self._received, mask, positions, *sums = parts
            inputs = {"inputs_embeds": self._stand_in(self._received)}
        optional = {"attention_mask": mask, "position_ids": positions}
        inputs.update({name: given for name, given in optional.items() if given is not None})
        self._check_accepted(inputs)
        try:
            result = self._run(inputs)
        except IndexError as problem:
            raise self._outside(inputs, problem) from problem
        finally:
            self._received = None
        more = self._router_sums(sums, result, mask)
        if self.is_last:
            return (result, *more) if more else result
        return (result, mask, positions, *more)

    def _router_sums(
        self, before: Sequence[torch.Tensor], result: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """What leaves beside the hidden state or logits: with a router loss its sums so far."""
        if self._routers is None:
            return ()
        return (self._routers.finish(next(iter(before), None), result, mask),)

    def _run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's own forward, up to the end of the stage."""
        if self._routers is not None:
            self._routers.start()
        try:
            output = self.model(**inputs, use_cache=False, return_dict=True)
        except StageExit as exit_:
            return exit_.hidden
        assert self.is_last, "a stage without the head ends at its last block"
        logits: torch.Tensor = output.logits
        return logits

    def global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Local parameters, each once, named as in the unsplit model's `named_parameters()`.

        A tied head goes by the name of the embeddings, also where only the head's copy is local.
        """
        seen: set[str] = set()
        for local_name, parameter in self.model.named_parameters(remove_duplicate=False):
            name = self.structure.global_name(local_name)
            if name not in seen:
                seen.add(name)
                yield name, parameter

    def global_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Local buffers that are saved, named as in the unsplit model."""
        saved = self.model.state_dict(keep_vars=True)
        yield from ((name, b) for name, b in self.model.named_buffers() if name in saved)

    def tied_parameters(self) -> dict[str, nn.Parameter]:
        """Those of `global_parameters` that both the first and the last layer use."""
        tied = self.structure.tied_sources
        return {name: parameter for name, parameter in self.global_parameters() if name in tied}

    def tie_of(self, name: str) -> int | None:
        """Index in `tied_layers` of the tie a parameter belongs to, None for most."""
        return 0 if name in self.structure.tied_sources else None

    def layer_of(self, name: str) -> int:
        """Pipeline layer of a parameter, by its name in `global_parameters`."""
        return self.structure.layer_of(name)

    def _blocks(self) -> list[nn.Module]:
        """Modules in the list of blocks, taps included."""
        return list(self.model.get_submodule(self.structure.blocks_path).children())

    def _install_entrance(self) -> None:
        """Swap the received hidden state in at the first local block.

        A stage with the head alone receives at the last tap, which hands it on to the head.
        """
        if self.is_first:
            return
        block = self._blocks()[min(self.start, self.structure.num_blocks) - 1]
        block.register_forward_pre_hook(self._swap_in, with_kwargs=True)

    def _install_exit(self) -> None:
        """End behind the last block when the head is elsewhere; taps end all other stages.

        Running on with empty modules would be wrong: some models scale logits after the head.
        """
        if self.stop == self.structure.num_layers - 1:
            self._blocks()[-1].register_forward_hook(_leave)

    def _recompute_blocks(self, layers: Range) -> None:
        """Keep only the input of some local blocks and compute them again in the backward pass."""
        first = max(self.start, layers.start, 1)
        last = min(self.stop, layers.stop, self.structure.num_layers - 1)
        for block in self._blocks()[first - 1 : max(last - 1, 0)]:
            # Wrapped below __call__, so that hooks run once. Non-re-entrant, so that parameters
            # get gradients also when the block's input needs none.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def _swap_in(
        self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: the received hidden state in place of the stand-in."""
        where = self.structure.hidden_argument
        if isinstance(where, str):
            return args, {**kwargs, where: self._received}
        return (*args[:where], self._received, *args[where + 1 :]), kwargs

    def _stand_in(self, hidden: torch.Tensor) -> torch.Tensor:
        """Zeros where embeddings would be.

        In the dtype of the weights, not of `hidden`: rotary embeddings and masks take the dtype of
        the embeddings, which under autocast differs from what a stage sends.
        """
        dtypes = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return torch.zeros_like(hidden, dtype=next(dtypes, hidden.dtype), requires_grad=False)

    def _check_batch(self, batch: dict[str, torch.Tensor]) -> None:
        """DataError unless a batch holds input_ids and nothing a pipeline does not carry."""
        assert self.is_first, "only the first stage takes a dict"
        unknown = sorted(set(batch) - set(INPUT_NAMES))
        if "input_ids" not in batch or unknown:
            raise DataError(
                f"a batch holds {sorted(batch)}; expected input_ids and optionally "
                "attention_mask and position_ids"
            )

    def _outside(self, inputs: dict[str, torch.Tensor], problem: IndexError) -> Exception:
        """What an IndexError of the embeddings means; any other as it is."""
        embeddings = self.model.get_input_embeddings() if self.is_first else None
        size = getattr(embeddings, "num_embeddings", None)
        if size is None:
            return problem
        ids = inputs["input_ids"]
        outside = ids[(ids < 0) | (ids >= size)]
        if len(outside):
            return DataError(
                f"a batch holds the input id {int(outside[0])}; expected 0 to {size - 1}, the "
                "model's vocabulary"
            )
        most = getattr(self.model.config, "max_position_embeddings", None)
        if most is None or (ids.shape[1] <= most and "position_ids" not in inputs):
            return problem
        return DataError(
            f"a batch holds positions that the model does not know (samples of {ids.shape[1]} "
            f"tokens); expected at most {most} tokens and positions below {most}"
        )

    def _check_accepted(self, inputs: dict[str, torch.Tensor]) -> None:
        """DataError for an optional input that this model's forward has no argument for."""
        for name in INPUT_NAMES[1:]:
            if name in inputs and name not in self.structure.accepted_inputs:
                raise DataError(
                    f"a batch holds {name}, which {self.structure.model_class.__name__} does not "
                    f"take; expected samples without {name}"
                )


def _leave(_block: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
    """Forward hook: end the stage behind its last block."""
    raise StageExit(output if isinstance(output, torch.Tensor) else output[0])
