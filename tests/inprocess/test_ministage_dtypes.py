"""Groups of unlike dtype side by side: boundaries convert, masters are float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.inprocess.exact_cases import (
    VOCAB,
    WIDTH,
    assert_values,
    language_model,
    ragged_lengths,
    sentences,
    tied_language_model,
)
from tests.inprocess.local_job import Job, Outcome, Step, run
from tests.inprocess.ministage_cases import NUM_LAYERS, ministage_plan
from tests.inprocess.plain_job import NO_TARGET
from tests.inprocess.test_exactness_precision import place
from zorse_ds.core.plan import Plan
from zorse_ds.runtime.local import MailboxTransport
from zorse_ds.runtime.values import Message

DTYPES = {
    "bf16 and fp32": {"a": "bfloat16", "b": "float32"},
    "fp16 and fp32": {"a": "float32", "b": "float16"},
    "fp16, bf16 and fp32": {"a": "bfloat16", "b": "float16", "c": "float32"},
    "all bf16": {"a": "bfloat16", "b": "bfloat16"},
}
SCALE = 2.0**10
"""Of losses, for the sake of float16."""


class FloatTokenSum:
    """Cross entropy in float32, summed over targets that labels tell."""

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        flat = logits.flatten(0, 1).float()
        total = F.cross_entropy(flat, labels.flatten(), ignore_index=NO_TARGET, reduction="sum")
        return total, self.count_targets(labels)

    def count_targets(self, labels: Tensor) -> int:
        return int((labels != NO_TARGET).sum())


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Unlike Adam it does not blow up the rounding of small gradients."""
    return torch.optim.SGD(groups, lr=0.3, momentum=0.5)


def mixed_plan(name: str, **options: Any) -> Plan:
    """Ministages of groups that compute in what `DTYPES` says."""
    dtypes = DTYPES[name]
    data = ministage_plan("".join(dtypes) * 2, **options).to_dict()
    for group in data["groups"]:
        group["dtype"] = dtypes[group["name"]]
    return Plan.from_dict(data)


def in_float32(layers: list[nn.Module]) -> list[nn.Module]:
    return [layer.float() for layer in layers]


def job(tied: bool = False) -> Job:
    made = tied_language_model(NUM_LAYERS - 2) if tied else language_model(NUM_LAYERS - 2)
    return Job(in_float32(made), FloatTokenSum(), make_optimizer=sgd)


def steps(count: int = 5, loss_scale: float = SCALE) -> list[Step]:
    return [Step(sentences(i, ragged_lengths(i)), loss_scale=loss_scale) for i in range(count)]


@pytest.mark.parametrize("levels", [(3,), (0, 2, 3)], ids=str)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_losses_are_near_float32(name: str, tied: bool, levels: tuple[int, ...]) -> None:
    plan = mixed_plan(name, zero_levels=levels, recompute="full")
    exact = mixed_plan(name, zero_levels=levels).to_dict()
    for group in exact["groups"]:
        del group["dtype"]
    found, expected = run(job(tied), plan, steps()), run(job(tied), Plan.from_dict(exact), steps())
    assert found.losses == pytest.approx(expected.losses, rel=0.01)
    assert found.norms == pytest.approx(expected.norms, rel=0.05)
    assert found.losses != expected.losses
    assert expected.losses[-1] != pytest.approx(expected.losses[0], rel=0.02), "nothing was learnt"


@pytest.mark.parametrize("name", DTYPES)
def test_messages_travel_in_what_their_receiver_computes_in(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[int, bool, torch.dtype]] = set()
    plan = mixed_plan(name)
    send = MailboxTransport.send

    def spy(self: MailboxTransport, boundary: int, peer: int, tag: int, message: Message) -> None:
        forward = self._rank in plan.group_of_stage(boundary).ranks
        for leaf in message.leaves:
            if isinstance(leaf, Tensor):
                seen.add((boundary, forward, leaf.dtype))
        send(self, boundary, peer, tag, message)

    monkeypatch.setattr(MailboxTransport, "send", spy)
    run(job(), plan, steps(1))
    dtypes = [getattr(torch, str(plan.group_of_stage(i).dtype)) for i in range(len(plan.stages))]
    expected = set()
    for boundary in range(len(plan.stages) - 1):
        expected |= {(boundary, True, dtypes[boundary + 1]), (boundary, False, dtypes[boundary])}
    assert seen == expected


@pytest.mark.parametrize("levels", [(3,), (2, 1, 0), (0, 3, 1)], ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_every_copy_is_the_master_rounded(name: str, levels: tuple[int, ...]) -> None:
    """Head and embedding are of one weight, in groups of unlike dtype."""
    outcome = run(job(tied=True), mixed_plan(name, zero_levels=levels), steps(3))
    for values, masters in zip(outcome.values, outcome.masters, strict=True):
        copies = {v.dtype for key, v in values.items() if key.split(" as ")[0] == "0.weight"}
        ends = {DTYPES[name]["a"], DTYPES[name][max(DTYPES[name])]}
        assert copies == {getattr(torch, dtype) for dtype in ends}
        assert sum(m.numel() for key, m in masters.items() if key.startswith("0.weight[")) == (
            VOCAB * WIDTH
        )
        for key, master in masters.items():
            owner, start, stop = place(key)
            assert master.dtype == torch.float32
            for value in (v for other, v in values.items() if other.split(" as ")[0] == owner):
                assert value.flatten()[start:stop].equal(master.to(value.dtype)), key


@pytest.mark.parametrize("name", ["fp16 and fp32", "fp16, bf16 and fp32"])
def test_an_overflow_in_one_group_skips_everywhere(name: str) -> None:
    """The scale is too large for float16 alone."""
    plan = mixed_plan(name)
    outcome = run(job(tied=True), plan, [*steps(1), *steps(1, loss_scale=2.0**40), *steps(1)])
    told = [(report.skipped, bool(report.not_finite)) for report in outcome.reports]
    assert told == [(None, False), ("overflow", True), (None, False)]
    assert_values(outcome.values[1], outcome.values[0], 0)
    assert_values(outcome.masters[1], outcome.masters[0], 0)
    assert moved(outcome, 1, 2) and all(
        value.isfinite().all() for value in outcome.values[2].values()
    )


def moved(outcome: Outcome, one: int, other: int) -> bool:
    """Every parameter differs between two steps."""
    pairs = ((value, outcome.values[other][name]) for name, value in outcome.values[one].items())
    return all(not torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_interleaved_and_delayed_give_the_same_bytes_in_low_precision(dtype: torch.dtype) -> None:
    made = tied_language_model(NUM_LAYERS - 2)
    plan = ministage_plan("abab", zero_levels=(3, 1))
    one, other = (
        run(
            Job(in_float32(made), FloatTokenSum(), sgd, dtype=dtype, interleaved=interleaved),
            plan,
            steps(3, loss_scale=1.0),
        )
        for interleaved in (False, True)
    )
    assert one.losses == other.losses
    for mine, theirs in zip(one.masters, other.masters, strict=True):
        assert_values(mine, theirs, 0)
