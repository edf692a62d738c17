"""What ranks hold and gather in a step of ministages: counted on storages and collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.inprocess.exact_cases import BATCH, Block, CountedError, assert_exact, blocks, vectors
from tests.inprocess.local_job import Job, Outcome, Sight, Step, run
from tests.inprocess.ministage_cases import HOSTS, job, layers, ministage_plan
from tests.random_plans import uniform_ministage_plan
from zorse_ds.core.plan import Plan
from zorse_ds.core.shards import ShardLayout
from zorse_ds.errors import ModelError
from zorse_ds.runtime.local import LocalProcessGroup
from zorse_ds.runtime.optimizer import ShardedOptimizer
from zorse_ds.schedule.instructions import ReshardParams, UnshardParams
from zorse_ds.schedule.residency import residencies_of

STEPS = [Step(vectors(i)) for i in range(2)]


def stage_bytes(optimizer: ShardedOptimizer) -> dict[int, int]:
    """Full parameters of each own stage."""
    return {
        stage: sum(each.flat.numel * each.flat.data.element_size() for each in own.sharded)
        for stage, own in optimizer.stages.items()
    }


def peak_bytes(sights: list[Sight]) -> int:
    return max(sum(sight.resident.values()) for sight in sights)


@pytest.mark.parametrize("interleaved", [False, True], ids=["delayed", "interleaved"])
@pytest.mark.parametrize("turnaround", [True, False], ids=["turning", "plain"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_two_stages_are_whole_at_most(hosts: str, turnaround: bool, interleaved: bool) -> None:
    """Stages whole at an instruction are those that the trace has gathered and not dropped."""
    plan = ministage_plan(HOSTS[hosts], turnaround=turnaround)
    outcome = run(
        job((0, 6), interleaved=interleaved), plan, [*STEPS, Step(vectors(5), trains=False)]
    )
    for optimizer, sights in zip(outcome.optimizers, outcome.sights, strict=True):
        sizes = stage_bytes(optimizer)
        assert peak_bytes(sights) <= sum(sorted(sizes.values())[-2:])
        gathered: set[int] = set()
        for sight in sights:
            if isinstance(sight.instruction, UnshardParams):
                gathered.add(sight.instruction.index)
            if isinstance(sight.instruction, ReshardParams):
                gathered.remove(sight.instruction.stage)
            assert sight.resident == {stage: sizes[stage] for stage in gathered}
            assert len(sight.resident) <= 2


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("hosts", ["abab", "abaca", "aaa"])
def test_parameters_are_gone_while_graphs_are_alive(hosts: str, recompute: str) -> None:
    outcome = assert_exact(job(), ministage_plan(hosts, recompute=recompute), STEPS)
    waiting = [
        sight.instruction.stage
        for sights in outcome.sights
        for sight in sights
        if isinstance(sight.instruction, ReshardParams)
        and sight.held[sight.instruction.stage]
        and sight.instruction.stage not in sight.resident
    ]
    last_visits = {hosts.rindex(name) for name in hosts}
    assert set(waiting) == set(range(len(hosts))) - last_visits


def test_the_peak_does_not_grow_with_micro_batches_but_shrinks_with_stages() -> None:
    peaks = {}
    for hosts in ("ab", "abab", "ababab"):
        for sizes in ([11], [1] * 11):
            data = ministage_plan(hosts).to_dict()
            for group in data["groups"]:
                group["gpus"] = [{"rank": group["gpus"][0]["rank"], "micro_batches": sizes}]
            data["groups"][1]["gpus"][0]["rank"] = 1
            outcome = run(job(), Plan.from_dict(data), STEPS[:1])
            peaks[hosts, len(sizes)] = max(map(peak_bytes, outcome.sights))
    assert all(peaks[hosts, 1] == peaks[hosts, 11] for hosts in ("ab", "abab", "ababab"))
    assert peaks["ab", 1] >= peaks["abab", 1] > peaks["ababab", 1]


def test_frozen_parameters_are_sharded_too() -> None:
    made = layers()
    for layer in made[1:-1]:
        layer.requires_grad_(False)
    plan = ministage_plan("abab")
    outcome = assert_exact(Job(made, CountedError()), plan, STEPS)
    a_block = sum(p.numel() * p.element_size() for p in Block().double().parameters())
    for rank, optimizer in enumerate(outcome.optimizers):
        sizes = stage_bytes(optimizer)
        assert sizes == {
            stage: plan.stages[stage].layers.size * a_block for stage in plan.stages_of_rank(rank)
        }
        shards = [each for own in optimizer.stages.values() for each in own.sharded]
        weights = [gpu.shard_weight for gpu in plan.group_of_rank(rank).gpus]
        share = next(g for g in plan.group_of_rank(rank).gpus if g.rank == rank).shard_weight
        kept = sum(each.shard.nbytes for each in shards)
        assert kept == pytest.approx(sum(sizes.values()) * share / sum(weights), abs=64)


class Spy:
    """Counts gathers of `LocalProcessGroup`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numel: Counter[int] = Counter()
        """Rank → elements of all vectors that it made whole."""
        gather = LocalProcessGroup.start_gather

        def counted(group: LocalProcessGroup, flat: torch.Tensor, layout: ShardLayout) -> Any:
            self.numel[group.rank] += flat.numel()
            return gather(group, flat, layout)

        monkeypatch.setattr(LocalProcessGroup, "start_gather", counted)


def gathered_in_a_step(plan: Plan, spy: Spy) -> tuple[Counter[int], Outcome]:
    """What each rank gathers in one step, beside what starting and reading the values takes."""
    found = []
    for num_steps in (1, 2):
        spy.numel.clear()
        outcome = run(job(), plan, STEPS[:num_steps])
        reading = {
            rank: num_steps * sum(stage_bytes(optimizer).values()) // 8
            for rank, optimizer in enumerate(outcome.optimizers)
        }
        found.append(Counter({rank: spy.numel[rank] - reading[rank] for rank in spy.numel}))
    return Counter({rank: found[1][rank] - found[0][rank] for rank in found[0]}), outcome


@pytest.mark.parametrize("turnaround", [True, False], ids=["turning", "plain"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_bytes_gathered_are_those_of_the_stays(
    hosts: str, turnaround: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    plan = ministage_plan(HOSTS[hosts], turnaround=turnaround)
    found, outcome = gathered_in_a_step(plan, spy)
    for rank, optimizer in enumerate(outcome.optimizers):
        sizes = stage_bytes(optimizer)
        stays = residencies_of(plan, plan.group_of_rank(rank).name, "ministage")
        assert found[rank] * 8 == sum(sizes[stay.stage] for stay in stays)
        total = sum(sizes.values())
        last = max(sizes)
        assert found[rank] * 8 == 2 * total - sizes[last], "the last stage is gathered once"


def test_gathers_do_not_depend_on_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    found = []
    for size in (BATCH, 1):
        data = ministage_plan("abab").to_dict()
        for group in data["groups"]:
            for gpu in group["gpus"]:
                total = sum(gpu["micro_batches"])
                gpu["micro_batches"] = [1] * total if size == 1 else [total]
        found.append(gathered_in_a_step(Plan.from_dict(data), spy)[0])
    assert found[0] == found[1]


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("hosts", ["abab", "abaca", "aaa"])
def test_interleaved_frees_a_stages_gradients_at_its_step(hosts: str, level: int) -> None:
    """So one stage has some at a time; delayed, all have until the end."""
    plan = ministage_plan(hosts, zero_levels=(level,))
    for interleaved in (False, True):
        outcome = run(job(interleaved=interleaved), plan, STEPS)
        for optimizer, sights in zip(outcome.optimizers, outcome.sights, strict=True):
            most = max(len(sight.with_grads) for sight in sights)
            assert most == (1 if interleaved else len(optimizer.stages))


def test_what_was_made_whole_is_dropped_when_its_reader_fails() -> None:
    plan = uniform_ministage_plan(1, 1, 3, 2)
    (optimizer,) = run(Job(blocks(2), CountedError()), plan, [Step(vectors(0, 3))]).optimizers
    (sharded,) = optimizer.stages[0].sharded
    with pytest.raises(OSError), optimizer.whole(0):
        assert sharded.flat.data.untyped_storage().nbytes()
        raise OSError("disk full")
    assert not sharded.flat.data.untyped_storage().nbytes()


def test_making_whole_may_be_nested_and_knows_its_stages() -> None:
    plan = uniform_ministage_plan(1, 1, 3, 2)
    (optimizer,) = run(Job(blocks(2), CountedError()), plan, [Step(vectors(0, 3))]).optimizers
    (sharded,) = optimizer.stages[0].sharded
    with optimizer.whole(0):
        with optimizer.whole(0):
            pass
        assert sharded.flat.data.untyped_storage().nbytes()
    with pytest.raises(ModelError, match="stage 7 is not on this rank"), optimizer.whole(7):
        pass


@pytest.mark.parametrize("hosts", HOSTS)
def test_tied_copies_are_sharded_like_what_is_owned(hosts: str) -> None:
    plan = ministage_plan(HOSTS[hosts])
    outcome = run(job((0, 6), (1, 3, 5)), plan, STEPS[:1])
    owned = [own for optimizer in outcome.optimizers for own in optimizer.stages.values()]
    assert any(own.copies for own in owned)
    for own in owned:
        flats = [*(bucket.flat for bucket in own.buckets), *own.copies]
        assert {id(flat) for flat in flats} == {id(each.flat) for each in own.sharded}
        assert not any(flat.data.untyped_storage().nbytes() for flat in flats)
