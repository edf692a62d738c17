"""Tiny transformers models, and running stages one behind the other, for the tests of stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tools.tiny_configs import CONFIGS, GPT2_SIZES, HEADS, OPT, SIZES
from zorse_ds.integrations.huggingface import CausalLMStage, CausalLMStages

__all__ = ["CONFIGS", "GPT2_SIZES", "HEADS", "OPT", "SIZES"]


def own_memory(model: torch.nn.Module) -> None:
    """Move weights off mapped files, whose alignment changes the last bit of CPU results."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()


def save_checkpoint(config: Any, folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Save a model with no weight at its initial value in several shards; return it, reloaded."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="20KB")
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **experts)
    own_memory(model)
    return model.eval()


def make_batch(kind: str = "plain") -> dict[str, torch.Tensor]:
    """Two rows of seven tokens: `plain`, `padded` on the right, or `packed` documents."""
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    if kind == "padded":
        return {"input_ids": ids, "attention_mask": torch.tensor([[1] * 5 + [0] * 2, [1] * 7])}
    if kind == "packed":
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]])
        return {"input_ids": ids, "position_ids": positions}
    return {"input_ids": ids}


def all_cuts(num_layers: int, max_stages: int = 4) -> Iterator[list[tuple[int, int]]]:
    """Every way to cut the layers into 1 … `max_stages` stages."""
    for num_cuts in range(max_stages):
        for inner in combinations(range(1, num_layers), num_cuts):
            yield list(pairwise((0, *inner, num_layers)))


class StageCache:
    """Builds each stage of a factory once, in evaluation mode."""

    def __init__(self, stages: CausalLMStages, **options: Any) -> None:
        self.stages = stages
        self._options = options
        self._built: dict[tuple[int, int], CausalLMStage] = {}

    def pipeline(self, cut: Iterable[tuple[int, int]]) -> list[CausalLMStage]:
        return [self._stage(layers) for layers in cut]

    def _stage(self, layers: tuple[int, int]) -> CausalLMStage:
        if layers not in self._built:
            self._built[layers] = self.stages.build(*layers, **self._options).eval()
        return self._built[layers]


def run(pipeline: Sequence[CausalLMStage], batch: Any) -> torch.Tensor:
    """The logits of stages that hand on to each other."""
    value = batch
    for stage in pipeline:
        value = stage(value)
    return value


def gradients(
    named: Iterable[tuple[str, torch.nn.Parameter]],
) -> dict[str, torch.Tensor]:
    """Gradients by name, those of copies of a tied parameter added up."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in named:
        if parameter.grad is not None:
            found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


def parameters_of(pipeline: Sequence[CausalLMStage]) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters of all stages."""
    return [item for stage in pipeline for item in stage.global_parameters()]


def backward(logits: torch.Tensor) -> None:
    """Backward of a sum in which every logit has a weight of its own."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).reshape(logits.shape)
    (logits * weights).sum().backward()


def reference(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of the unsplit model."""
    model.zero_grad(set_to_none=True)
    logits = model(**batch, use_cache=False).logits
    backward(logits)
    return logits, gradients(model.named_parameters())


def assert_same_step(pipeline: Sequence[CausalLMStage], model: Any, batch: Any) -> None:
    """The stages give the very logits and gradients of the unsplit model."""
    logits, expected = reference(model, batch)
    for stage in pipeline:
        stage.zero_grad(set_to_none=True)
    ours = run(pipeline, batch)
    backward(ours)
    assert torch.equal(ours, logits)
    found = gradients(parameters_of(pipeline))
    assert found.keys() == expected.keys()
    unequal = [name for name, grad in expected.items() if not torch.equal(found[name], grad)]
    assert unequal == []
