"""One case, run twice: by the real engine on every rank, and by plain PyTorch in one process.

The reference takes samples one at a time, unpadded, and shares no code with the product.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.utils.data import default_collate

import zorse_ds
from tests.ranks.engine_models import Sample, mean_of_sample, mlp
from tests.ranks.harness import note, run_ranks
from zorse_ds import Plan, ZorseEngine, ZorsePipelineModule

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
BASE_SEED = 1234
TOLERANCE = 1e-5

Optimizers = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """What `SGD` says."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """What to train; `batches` are the global batches, one a step."""

    name: str
    plan: dict[str, Any]
    batches: Sequence[Sequence[Sample]]
    layers: Callable[[], list[Any]] = mlp
    loss_fn: Any = F.mse_loss
    sample_loss: Callable[[Any, Any], tuple[Tensor, int]] = mean_of_sample
    """The reference's loss of one sample: `(sum, number of targets)`."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    optimizer: Optimizers = sgd
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip: float = 0.0
    """The reference's; `config` has the engine's."""
    arguments: Callable[[ZorsePipelineModule], dict[str, Any]] = lambda model: {}
    """More arguments of `initialize`."""

    @property
    def world_size(self) -> int:
        return sum(len(group["gpus"]) for group in self.plan["groups"])


@dataclass
class Result:
    """What came of a case; `weights` by the name a parameter has in the whole model."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """The learning rate after each step."""
    skipped_steps: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)


def make_engine(case: Case, **arguments: Any) -> ZorseEngine:
    """Collective: the engine of a case."""
    note(case.name)
    plan = Plan.from_dict(case.plan)
    model = ZorsePipelineModule(
        case.layers(), plan, loss_fn=case.loss_fn, collate_fn=case.collate_fn
    )
    config = {"optimizer": SGD, "gradient_clipping": 0.0, "steps_per_print": None} | case.config
    given = case.arguments(model) | arguments
    if config["optimizer"] is None or given.get("optimizer") is not None:
        del config["optimizer"]
    engine, *_ = zorse_ds.initialize(model=model, config=config, **given)
    return engine


def train(engine: ZorseEngine, num_steps: int, data_iter: Any = None) -> Result:
    """Collective: some steps, and what they did."""
    result = Result()
    for _ in range(num_steps):
        result.losses.append(float(engine.train_batch(data_iter)))
        data_iter = None
        result.norms.append(float(engine.get_global_grad_norm()))
        result.rates.append(engine.optimizer.param_groups[0]["lr"])
    result.skipped_steps = engine.skipped_steps
    result.weights = weights_of(engine)
    return result


def weights_of(engine: ZorseEngine) -> dict[str, Tensor]:
    """This rank's parameters. A tied one may be there twice: the copies must be the same bits.

    Collective: sharded parameters are made whole.
    """
    weights: dict[str, Tensor] = {}
    for stage, model in engine.module.stage_models.items():
        with engine.whole(stage):
            for name, parameter in model.global_parameters():
                assert name not in weights or torch.equal(weights[name], parameter)
                weights[name] = parameter.detach().clone()
    return weights


def run_case(rank: int, case: Case) -> Result:
    """Collective: train on all batches of a case."""
    engine = make_engine(case)
    result = train(engine, len(case.batches), iter([list(batch) for batch in case.batches]))
    engine.destroy()
    return result


def run_cases(cases: Sequence[Case], timeout_s: float = 150) -> dict[str, list[Result]]:
    """Results by case and rank; one launch for each world size."""
    results: dict[str, list[Result]] = {}
    for world_size in sorted({case.world_size for case in cases}):
        own = [case for case in cases if case.world_size == world_size]

        def run_all(rank: int, own: Sequence[Case] = own) -> list[Result]:
            return [run_case(rank, case) for case in own]

        by_rank = run_ranks(world_size, run_all, timeout_s=timeout_s)
        for index, case in enumerate(own):
            results[case.name] = [per_rank[index] for per_rank in by_rank]
    return results


class Reference:
    """The layers of a case in one process."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.tied: dict[str, nn.Module] = {}
        layers = copy.deepcopy(list(layers))
        self.layers = [self._built(index, layer) for index, layer in enumerate(layers)]

    def _built(self, index: int, layer: Any) -> Any:
        if not isinstance(layer, LayerSpec):
            return layer
        if isinstance(layer, TiedLayerSpec) and layer.key in self.tied:
            module = self.tied[layer.key]
        else:
            torch.manual_seed(BASE_SEED + index)
            module = layer.typename(*layer.module_args, **layer.module_kwargs)
        if not isinstance(layer, TiedLayerSpec):
            return module
        self.tied[layer.key] = module
        forward_fn = layer.forward_fn
        return module if forward_fn is None else lambda x: forward_fn(module, x)

    def __call__(self, value: Any) -> Any:
        for layer in self.layers:
            value = layer(value)
        return value

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Each once: a shared parameter under its first name, a tied layer's under its key."""
        named = {
            f"tied.{key}.{local}": parameter
            for key, module in self.tied.items()
            for local, parameter in module.named_parameters()
        }
        seen = {id(parameter) for parameter in named.values()}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, nn.Module):
                for local, parameter in layer.named_parameters():
                    if id(parameter) not in seen:
                        named[f"{index}.{local}"] = parameter
                    seen.add(id(parameter))
        return named


def run_reference(case: Case) -> Result:
    """Train on all batches of a case in this process."""
    model, result = Reference(case.layers()), Result()
    parameters = [p for p in model.named_parameters().values() if p.requires_grad]
    optimizer = case.optimizer(parameters)
    scheduler = case.scheduler(optimizer) if case.scheduler is not None else None
    for batch in case.batches:
        optimizer.zero_grad()
        loss, count = mean_loss(model, case, batch)
        result.losses.append(float(loss.detach()))
        if count:
            loss.backward()
            grads = [p.grad.flatten() for p in parameters if p.grad is not None]
            norm = float(torch.cat(grads).norm())
            if case.clip:
                torch.nn.utils.clip_grad_norm_(parameters, case.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        else:
            norm = 0.0
            result.skipped_steps += 1
        result.norms.append(norm)
        result.rates.append(optimizer.param_groups[0]["lr"])
    result.weights = {n: p.detach().clone() for n, p in model.named_parameters().items()}
    return result


def mean_loss(model: Reference, case: Case, batch: Sequence[Sample]) -> tuple[Tensor, int]:
    """Mean over all targets of a global batch (NaN without one), and their number."""
    collate = case.collate_fn or default_collate
    total, count = torch.zeros(()), 0
    for sample in batch:
        inputs, labels = collate([sample])
        loss_sum, num_targets = case.sample_loss(model(inputs), labels)
        if num_targets:
            total, count = total + loss_sum, count + num_targets
    return total / count if count else torch.tensor(float("nan")), count


def check(results: Sequence[Result], reference: Result) -> None:
    """Every rank tells what the reference tells, and all ranks together hold every weight."""
    for result in results:
        assert_close(result.losses, reference.losses, "losses")
        assert_close(result.norms, reference.norms, "gradient norms")
        assert_close(result.rates, reference.rates, "learning rates")
        assert result.skipped_steps == reference.skipped_steps
        for name, weight in result.weights.items():
            assert_close(weight, reference.weights[name], name)
    assert set().union(*(result.weights for result in results)) == set(reference.weights)
    check_copies(results)


def check_copies(results: Sequence[Result]) -> None:
    """Ranks that hold the same parameter hold the same bits."""
    first: dict[str, Tensor] = {}
    for result in results:
        for name, weight in result.weights.items():
            assert torch.equal(first.setdefault(name, weight), weight), f"copies of {name} differ"


def assert_close(found: Any, expected: Any, what: str) -> None:
    """Largest deviation, over the largest value, within `TOLERANCE`; NaN only beside NaN."""
    found = torch.as_tensor(found, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
    assert torch.equal(found.isnan(), expected.isnan()), f"{what}: {found} instead of {expected}"
    found, expected = found.nan_to_num(), expected.nan_to_num()
    if found.numel():
        error = float((found - expected).abs().max())
        limit = TOLERANCE * max(float(expected.abs().max()), 1e-3)
        assert error <= limit, f"{what}: off by {error:.3g}, at most {limit:.3g} allowed"
