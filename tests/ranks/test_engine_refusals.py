"""What is refused before training: on every rank, in one sentence, without a rank that waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import zorse_ds
from tests.ranks.engine_cases import SGD, Case, Reference, assert_close, make_engine, mean_loss
from tests.ranks.engine_models import WIDTH, Block, batches_of, mlp, plan_of, vectors
from tests.ranks.harness import run_ranks
from zorse_ds import Plan, ZorsePipelineModule
from zorse_ds.errors import ZorseError

PLAN = plan_of([[[3, 1], [2, 1]], [[2, 5]]], [0, 3, 6], zero=[2, 1], weights=[1, 2, 1])
OTHER_CUT = plan_of([[[3, 1], [2, 1]], [[2, 5]]], [0, 4, 6], zero=[2, 1], weights=[1, 2, 1])
# Other groups: made with this plan, rank 1 would wait for process groups that nobody else makes.
OTHER_GROUPS = plan_of([[[7]], [[2, 3], [2]]], [0, 3, 6])
FOUR_RANKS = plan_of([[[3, 1], [2, 1]], [[2, 5]], [[7]]], [0, 3, 5, 6])
SEVEN_LAYERS = plan_of([[[3, 1], [2, 1]], [[2, 5]]], [0, 3, 7])
CASE = Case("refusals", PLAN, batches_of(vectors(14), [7, 7]))


def start(
    *, plan: dict[str, Any] = PLAN, layers: Any = mlp, config: Any = None, **arguments: Any
) -> Any:
    given = {"optimizer": SGD} if config is None else config
    model = ZorsePipelineModule(layers(), Plan.from_dict(plan), loss_fn=nn.MSELoss())
    engine, *_ = zorse_ds.initialize(model=model, config=given, **arguments)
    return engine


def train_without_optimizer(rank: int) -> None:
    """Such an engine evaluates, like one process, but does not train."""
    engine = start(config={})
    batch = CASE.batches[0]
    expected = float(mean_loss(Reference(mlp()), CASE, batch)[0].detach())
    assert_close(float(engine.eval_batch(iter([batch]))), expected, "loss")
    engine.train_batch(iter([batch]))


def change_batch_size(rank: int) -> None:
    start().set_train_batch_size(14)


def save(rank: int) -> None:
    start().save_checkpoint("nowhere", tag="a/b")


def save_layers(rank: int) -> None:
    start().save_pretrained("nowhere")


def load(rank: int) -> None:
    start().load_checkpoint("nowhere", custom_load_fn=print)


def used_optimizer(rank: int) -> None:
    layers = mlp()
    model = ZorsePipelineModule(layers, Plan.from_dict(PLAN), loss_fn=nn.MSELoss())
    optimizer = torch.optim.LBFGS(list(model.parameters()))
    zorse_ds.initialize(model=model, optimizer=optimizer, config={})


def only_on_rank_1(rank: int, key: str, value: Any, other: Any) -> None:
    start(**{key: value if rank == 1 else other})


def nan_from_the_start(rank: int) -> None:
    def broken() -> list[nn.Module]:
        layers = mlp()
        with torch.no_grad():
            next(layers[4].parameters())[0] = float("nan")
        return layers

    start(layers=broken).train_batch(iter(CASE.batches))


def other_version(rank: int, module: Any) -> None:
    true = module.__version__
    module.__version__ = "0.0.1" if rank == 1 else true
    try:
        start()
    finally:
        module.__version__ = true


def clipped(norm: float) -> dict[str, Any]:
    return {"optimizer": SGD, "gradient_clipping": norm}


def unlike(key: str, value: Any, other: Any) -> Callable[[int], None]:
    return partial(only_on_rank_1, key=key, value=value, other=other)


ON_RANK_1 = "on ranks [0, 2]", "on ranks [1]"
REFUSALS: dict[str, tuple[Callable[[int], Any], tuple[str, ...]]] = {
    "another plan on rank 1": (
        unlike("plan", OTHER_CUT, PLAN),
        ("WorldError", "disagree about the plan", *ON_RANK_1),
    ),
    "other groups on rank 1": (
        unlike("plan", OTHER_GROUPS, PLAN),
        ("WorldError", "disagree about the plan", *ON_RANK_1),
    ),
    "another world on rank 1": (
        unlike("plan", FOUR_RANKS, PLAN),
        ("WorldError", "disagree about the plan", *ON_RANK_1),
    ),
    "another model on rank 1": (
        unlike("layers", lambda: [*mlp(), Block()], mlp),
        ("WorldError", "disagree about the pipeline layers", *ON_RANK_1),
    ),
    "another config on rank 1": (
        unlike("config", clipped(0.5), clipped(1.0)),
        ("WorldError", "config's gradient_clipping: 1.0 on ranks [0, 2], 0.5 on ranks [1]"),
    ),
    "a key more on rank 1": (
        unlike("config", {"optimizer": SGD, "sparse_gradients": True}, {"optimizer": SGD}),
        ("WorldError", "config's sparse_gradients: nothing on ranks [0, 2], true on ranks [1]"),
    ),
    "a NaN loss from the start": (
        nan_from_the_start,
        ("DataError", "the loss of the first step is nan over 7 targets", "look at the weights"),
    ),
    **{
        f"another version of {module.__name__} on rank 1": (
            partial(other_version, module=module),
            (f"disagree about the {module.__name__} version", "0.0.1 on ranks [1]"),
        )
        for module in (zorse_ds, torch, deepspeed)
    },
    "a plan for four ranks": (
        lambda rank: start(plan=FOUR_RANKS),
        ("PlanError", "the plan names 4 ranks, but 3 were started; expected 4 processes, as `deep"),
    ),
    "a plan for seven layers": (
        lambda rank: start(plan=SEVEN_LAYERS),
        ("PlanError", "cover 7 pipeline layers, but the model has 6", "to end at 6"),
    ),
    "another batch size": (
        lambda rank: start(config={"train_batch_size": 8, "optimizer": SGD}),
        ("ConfigError", "train_batch_size is 8, but the plan's global_batch_size is 7"),
    ),
    "an unknown key": (
        lambda rank: start(config={"optimizer": SGD, "zorse": {"timeout": 5}}),
        ("ConfigError", "did you mean 'timeout_s'?"),
    ),
    "no config": (
        lambda rank: zorse_ds.initialize(
            model=ZorsePipelineModule(mlp(), Plan.from_dict(PLAN), loss_fn=nn.MSELoss())
        ),
        ("ConfigError", "none of config and --deepspeed_config were given"),
    ),
    "no plan": (
        lambda rank: ZorsePipelineModule(mlp(), loss_fn=nn.MSELoss()),
        ("PlanError", "was given no plan"),
    ),
    "no layers": (
        lambda rank: ZorsePipelineModule([], Plan.from_dict(PLAN)),
        ("ModelError", "layers is empty"),
    ),
    "an mpu": (lambda rank: start(mpu=object()), ("ConfigError", "mpu was given")),
    "a plain module": (
        lambda rank: zorse_ds.initialize(model=nn.Linear(1, 1), config={}),
        ("ModelError", "was given a Linear; expected a ZorsePipelineModule"),
    ),
    "an optimizer of whole parameters": (used_optimizer, ("ConfigError", "LBFGS")),
    "training without optimizer": (
        train_without_optimizer,
        ("ConfigError", "train_batch was called without an optimizer"),
    ),
    "another batch size later": (change_batch_size, ("ConfigError", "cannot become 14")),
    "micro-batches of evaluation": (
        lambda rank: start().eval_batch(iter(CASE.batches), num_micro_batches=2),
        ("ConfigError", "num_micro_batches was given to eval_batch"),
    ),
    "checkpoints": (save, ("CheckpointError", "the tag is 'a/b'; expected the name of a folder")),
    "loading": (load, ("ConfigError", "custom_load_fn was given")),
    "exporting layers": (save_layers, ("ModelError", "save_pretrained was called on a model made")),
}


def refused(rank: int) -> dict[str, str]:
    """What each attempt raised, and at last that a right one still works."""
    found = {}
    for name, (attempt, _) in REFUSALS.items():
        try:
            attempt(rank)
            found[name] = "nothing"
        except ZorseError as error:
            found[name] = f"{type(error).__name__}: {error}"
    engine = start()
    found["a right one"] = str(float(engine.train_batch(iter(CASE.batches))))
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def sentences() -> list[dict[str, str]]:
    return run_ranks(3, refused, timeout_s=90)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_sentence_on_every_rank(
    name: str, sentences: list[dict[str, str]]
) -> None:
    first = sentences[0][name]
    assert [found[name] for found in sentences] == [first] * 3
    assert "\n" not in first
    for part in REFUSALS[name][1]:
        assert part in first


def test_training_works_after_refusals(sentences: list[dict[str, str]]) -> None:
    expected = float(mean_loss(Reference(mlp()), CASE, CASE.batches[0])[0].detach())
    for found in sentences:
        assert_close(float(found["a right one"]), expected, "loss")


class Frozen(Block):
    """Made under whatever seed a process has; trains a part of itself only."""

    def __init__(self) -> None:
        super().__init__()
        self.outer.weight.requires_grad_(False)


def weights_made_under_unlike_seeds(rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    layers = [Frozen() for _ in range(4)] + [LayerSpec(Block, WIDTH), nn.Linear(WIDTH, WIDTH)]
    engine = make_engine(Case("unlike seeds", PLAN, [], layers=lambda: layers))
    engine.destroy()
    named = [m.global_parameters() for m in engine.module.stage_models.values()]
    return {name: parameter.detach().clone() for own in named for name, parameter in own}


def test_a_group_starts_from_equal_weights_even_frozen_ones() -> None:
    first, second, _ = run_ranks(3, weights_made_under_unlike_seeds, timeout_s=60)
    assert any(".outer." in name for name in first)
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
