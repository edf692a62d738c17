"""Ministages in unusual steps: short batches, evaluation, no targets, infinite gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.inprocess.exact_cases import (
    BATCH,
    CountedError,
    CountedTokenSum,
    assert_exact,
    assert_values,
    plainly,
    ragged_lengths,
    sentences,
    tied_language_model,
    vectors,
    without_targets,
)
from tests.inprocess.local_job import Job, Step, run
from tests.inprocess.ministage_cases import HOSTS, NUM_LAYERS, job, layers, ministage_plan
from tests.inprocess.test_ministage_random import assert_same_bytes
from zorse_ds.integrations.deepspeed import layers as deepspeed_layers

LEVELS = [(0,), (1,), (2,), (3,), (3, 1, 0)]
TIES = {"untied": [], "across and inside groups": [(0, NUM_LAYERS - 1), (1, 3, 5)]}


@pytest.mark.parametrize("interleaved", [False, True], ids=["delayed", "interleaved"])
@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_ranks_without_micro_batches(levels: tuple[int, ...], ties: str, interleaved: bool) -> None:
    """Batches of one and two samples leave most ranks to the collectives."""
    steps = [Step(vectors(size, size)) for size in (1, BATCH, 2, 1)]
    for hosts in HOSTS.values():
        plan = ministage_plan(hosts, zero_levels=levels)
        assert_exact(job(*TIES[ties], interleaved=interleaved), plan, steps)


@pytest.mark.parametrize("recompute_every", [0, 1, 2, 3])
@pytest.mark.parametrize("turnaround", [True, False])
def test_recompute(turnaround: bool, recompute_every: int) -> None:
    options = {"recompute": "full", "recompute_every": recompute_every} if recompute_every else {}
    frozen = job((0, 6))
    frozen.layers[2].requires_grad_(False)  # type: ignore[union-attr]
    for hosts in HOSTS.values():
        plan = ministage_plan(hosts, turnaround=turnaround, **options)
        assert_exact(frozen, plan, [Step(vectors(i), 0.05) for i in range(2)])


@pytest.mark.parametrize("interleaved", [False, True], ids=["delayed", "interleaved"])
def test_lengths_that_change(interleaved: bool) -> None:
    """Token by token, with the divisor counted from labels; head and embedding share a weight."""
    steps = [Step(sentences(i, ragged_lengths(i))) for i in range(3)]
    made = Job(tied_language_model(NUM_LAYERS - 2), CountedTokenSum(), interleaved=interleaved)
    for hosts in HOSTS.values():
        assert_exact(made, ministage_plan(hosts, recompute="full"), steps)


@pytest.mark.parametrize("interleaved", [False, True], ids=["delayed", "interleaved"])
def test_evaluation_between_steps(interleaved: bool) -> None:
    steps = [
        Step(vectors(i, size), trains=trains)
        for i, (size, trains) in enumerate(
            [(BATCH, True), (5, False), (BATCH, True), (BATCH, False), (1, False)]
        )
    ]
    for hosts in HOSTS.values():
        made = job((0, 6), interleaved=interleaved)
        outcome = assert_exact(made, ministage_plan(hosts), steps)
        model, _ = plainly(made, steps[:1])
        expected = sum(
            float((model(inputs[None]) - labels).square().sum().detach())
            for inputs, labels in steps[1].samples
        )
        assert outcome.reports[1].loss == pytest.approx(expected / 5, abs=1e-12)
        assert_values(outcome.values[1], outcome.values[0], 0)
        assert_values(outcome.values[4], outcome.values[2], 0)


@pytest.mark.parametrize("interleaved", [False, True], ids=["delayed", "interleaved"])
def test_a_step_without_targets_changes_nothing(interleaved: bool) -> None:
    samples = sentences(0, ragged_lengths(0))
    steps = [Step(samples), Step(without_targets(samples, range(BATCH))), Step(samples)]
    made = Job(tied_language_model(NUM_LAYERS - 2), CountedTokenSum(), interleaved=interleaved)
    for hosts in HOSTS.values():
        outcome = assert_exact(made, ministage_plan(hosts, zero_levels=(3, 1)), steps)
        report = outcome.reports[1]
        assert (report.skipped, report.num_targets, report.not_finite) == ("no targets", 0, ())
        assert math.isnan(report.loss)
        assert_values(outcome.values[1], outcome.values[0], 0)
        assert_values(outcome.masters[1], outcome.masters[0], 0)


class Poisoned(nn.Module):
    """A block whose own gradient is infinite, while that of its input stays as it is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value) + _Infinite.apply(self.scale) * value.detach()


class _Infinite(torch.autograd.Function):
    """The identity, whose gradient is infinite while `poison` says so."""

    poison = True

    @staticmethod
    def forward(ctx: object, scale: Tensor) -> Tensor:
        return scale.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return torch.full_like(grad, math.inf) if _Infinite.poison else grad


def poisoned_job(layer: int, interleaved: bool) -> Job:
    made = layers((0, 6))
    made[layer] = Poisoned(made[layer])
    return Job(made, CountedError(), interleaved=interleaved)


@pytest.mark.parametrize("hosts", ["abab", "abaca", "aaa"])
def test_not_finite_and_delayed_no_stage_steps(hosts: str) -> None:
    plan = ministage_plan(hosts, zero_levels=(3, 1, 0))
    made = poisoned_job(3, interleaved=False)
    outcome = run(made, plan, [Step(vectors(0))])
    report = outcome.reports[0]
    assert report.skipped == "overflow"
    assert report.not_finite == (plan.stage_of_layer(3),)
    expected = {name: p.detach() for name, p in plainly(made, [])[0].named_parameters().items()}
    assert_values(outcome.values[0], expected, 0)


@pytest.mark.parametrize("hosts", ["abab", "abaca", "aaa"])
def test_not_finite_and_interleaved_its_own_stage_alone_stays(hosts: str) -> None:
    plan = ministage_plan(hosts, zero_levels=(3, 1, 0))
    made = poisoned_job(3, interleaved=True)
    outcome = run(made, plan, [Step(vectors(0))])
    stage = plan.stage_of_layer(3)
    report = outcome.reports[0]
    assert report.skipped is None
    assert report.not_finite == (stage,)
    assert not math.isfinite(report.grad_norm)
    _, healthy = plainly_healthy(made)
    start, stop = plan.stages[stage].layers
    before = {name: p.detach() for name, p in plainly(made, [])[0].named_parameters().items()}
    stays = {name for name in before if start <= int(name.split(".")[0]) < stop}
    assert stays and stays < set(before)
    assert_values(outcome.values[0], {n: (before if n in stays else healthy)[n] for n in before})


def plainly_healthy(made: Job) -> tuple[object, dict[str, Tensor]]:
    """What one step gives where every gradient is finite."""
    _Infinite.poison = False
    try:
        model, outcome = plainly(made, [Step(vectors(0))])
    finally:
        _Infinite.poison = True
    return model, outcome.values[0]


def test_not_finite_everywhere_nothing_steps_in_either_mode() -> None:
    plan = ministage_plan("abab", zero_levels=(3, 2))
    samples = vectors(0)
    samples[0] = (samples[0][0] * math.inf, samples[0][1])
    one, other = (
        run(job((0, 6), interleaved=interleaved), plan, [Step(samples), Step(samples)])
        for interleaved in (False, True)
    )
    for outcome in (one, other):
        assert [report.skipped for report in outcome.reports] == ["overflow"] * 2
        assert [report.not_finite for report in outcome.reports] == [(0, 1, 2, 3)] * 2
    for mine, theirs in zip(one.values, other.values, strict=True):
        assert_values(mine, theirs, 0)


def test_a_scheduled_rate_and_two_param_groups_give_the_same_bytes() -> None:
    made = {
        "options": [{"lr": 0.1}, {"weight_decay": 0.0}],
        "group_of": lambda name: int("bias" in name),
        "make_scheduler": lambda inner: torch.optim.lr_scheduler.StepLR(inner, 1, 0.5),
    }
    steps = [Step(vectors(i)) for i in range(3)]
    for hosts in HOSTS.values():
        plan = ministage_plan(hosts, zero_levels=(3, 0))
        one, other = (
            assert_exact(job((0, 6), interleaved=interleaved, **made), plan, steps)
            for interleaved in (False, True)
        )
        assert_same_bytes(one, other)


def test_interleaved_steps_need_a_loss_that_counts() -> None:
    plan = ministage_plan("abab")
    uncounted = Job(layers(), lambda outputs, labels: outputs.sum(), interleaved=True)
    with pytest.raises(AssertionError, match="count_targets"):
        run(uncounted, plan, [Step(vectors(0))])


@pytest.mark.parametrize("options", [{"clip": 0.1}, {"loss_scale": 2.0}], ids=str)
def test_interleaved_steps_can_neither_clip_nor_scale(options: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match="need the norm of all stages"):
        run(job(interleaved=True), ministage_plan("abab"), [Step(vectors(0), **options)])


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({"recompute_every": 1}, [1] * 7),
        ({"recompute_every": 2}, [2, 2, 2, 1]),
        ({"recompute_every": 3}, [3, 3, 1]),
        ({"recompute_every": 9}, [7]),
        ({"recompute_layers": 4}, [1] * 4),
        ({"recompute_layers": 5, "recompute_every": 2}, [2, 2, 1]),
        ({"recompute_layers": 8}, [1] * 7),
    ],
    ids=str,
)
def test_recompute_keeps_an_activation_every_so_many_layers(
    options: dict[str, int], pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    checkpoint = deepspeed_layers.checkpoint

    def spy(run: object, calls: tuple[object, ...], value: Tensor, **options: object) -> object:
        found.append(len(calls))
        return checkpoint(run, calls, value, **options)

    monkeypatch.setattr(deepspeed_layers, "checkpoint", spy)
    plan = ministage_plan("b", recompute="full", **options)
    run(job(), plan, [Step(vectors(0))])
    assert found == pieces * 3, "once a micro-batch"
