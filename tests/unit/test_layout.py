"""Where samples are: micro-batches by progress, transfers as overlaps, shards by weight."""

import pytest

from tests.random_plans import random_plan, uniform_plan
from zorse_ds.core.layout import Layout, cut_into_micro_batches, lay_out
from zorse_ds.core.plan import GpuGroup, Plan
from zorse_ds.core.shards import cut_into_shards, shard_layout
from zorse_ds.ranges import Range

SEEDS = range(100)


def group(*micro_batches: list[int], weights: list[float] | None = None) -> GpuGroup:
    weights = weights or [1.0] * len(micro_batches)
    gpus = [
        {"rank": rank, "micro_batches": sizes, "shard_weight": weight}
        for rank, (sizes, weight) in enumerate(zip(micro_batches, weights, strict=True))
    ]
    return GpuGroup.model_validate({"name": "g", "gpus": gpus})


def test_micro_batches_lie_by_progress() -> None:
    # Progress of rank 0: 1/4, 3/4; of rank 1: 1/8, 3/8, 5/8, 7/8.
    found = cut_into_micro_batches(group([5, 5], [1, 1, 1, 1]))
    assert [(each.rank, *each.samples) for each in found] == [
        (1, 0, 1),
        (0, 1, 6),
        (1, 6, 7),
        (1, 7, 8),
        (0, 8, 13),
        (1, 13, 14),
    ]
    assert [each.index for each in found] == list(range(6))


def test_equal_progress_goes_to_the_lower_rank() -> None:
    found = cut_into_micro_batches(group([1, 1], [1, 1], [2]))
    assert [each.rank for each in found] == [0, 1, 2, 0, 1]


def test_a_rank_without_micro_batches_has_none() -> None:
    assert {each.rank for each in cut_into_micro_batches(group([3], []))} == {0}


@pytest.mark.parametrize("seed", SEEDS)
def test_every_stage_holds_every_sample_once_and_each_rank_its_sizes(seed: int) -> None:
    plan = random_plan(seed)
    layout = lay_out(plan)
    assert layout.num_stages == len(plan.stages)
    for stage, micro_batches in enumerate(layout.micro_batches):
        samples = [x for each in micro_batches for x in range(*each.samples)]
        assert samples == list(range(plan.global_batch_size))
        for gpu in plan.group_of_stage(stage).gpus:
            own = [each.samples.size for each in micro_batches if each.rank == gpu.rank]
            assert own == list(gpu.micro_batches)


def owner(layout: Layout, stage: int, sample: int) -> int:
    """Index of the micro-batch that holds a sample, found by looking at all."""
    (index,) = [
        each.index
        for each in layout.micro_batches[stage]
        if each.samples.start <= sample < each.samples.stop
    ]
    return index


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_crosses_every_boundary_once_between_its_owners(seed: int) -> None:
    plan = random_plan(seed)
    layout = lay_out(plan)
    for boundary, transfers in enumerate(layout.transfers):
        crossed = []
        for transfer in transfers:
            assert transfer.boundary == boundary
            source = layout.micro_batches[boundary][transfer.source]
            target = layout.micro_batches[boundary + 1][transfer.target]
            assert (transfer.source_rank, transfer.target_rank) == (source.rank, target.rank)
            for sample in range(*transfer.samples):
                crossed.append(sample)
                assert owner(layout, boundary, sample) == transfer.source
                assert owner(layout, boundary + 1, sample) == transfer.target
        assert crossed == list(range(plan.global_batch_size))
        # One message a pair of micro-batches, not one a sample.
        pairs = [(transfer.source, transfer.target) for transfer in transfers]
        assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("seed", SEEDS)
def test_transfers_are_numbered_and_found_by_their_ends(seed: int) -> None:
    layout = lay_out(random_plan(seed))
    transfers = [transfer for boundary in layout.transfers for transfer in boundary]
    assert [transfer.index for transfer in transfers] == list(range(len(transfers)))
    outgoing = [transfer for own in layout.outgoing.values() for transfer in own]
    incoming = [transfer for own in layout.incoming.values() for transfer in own]
    assert sorted(t.index for t in outgoing) == sorted(t.index for t in incoming)
    assert len(outgoing) == len(transfers)
    for (stage, micro_batch), own in layout.outgoing.items():
        assert {(t.boundary, t.source) for t in own} == {(stage, micro_batch)}
    for (stage, micro_batch), own in layout.incoming.items():
        assert {(t.boundary + 1, t.target) for t in own} == {(stage, micro_batch)}


def test_equal_groups_hand_over_one_to_one() -> None:
    layout = lay_out(uniform_plan(3, 2, 4))
    for transfers in layout.transfers:
        assert [(transfer.source, transfer.target) for transfer in transfers] == [
            (i, i) for i in range(8)
        ]


def test_stages_of_one_group_pass_locally() -> None:
    plan = Plan.from_dict(
        {
            "global_batch_size": 2,
            "schedule": "ministage",
            "groups": [{"name": "a", "gpus": [{"rank": 0, "micro_batches": [1, 1]}]}],
            "stages": [{"group": "a", "layers": [0, 1]}, {"group": "a", "layers": [1, 2]}],
        }
    )
    assert all(transfer.is_local for transfer in lay_out(plan).transfers[0])


def test_shards_follow_the_weights() -> None:
    layout = cut_into_shards(10, group([1], [1], [1], weights=[2.0, 0.0, 1.0]))
    assert layout.shards == ((0, 7), (7, 7), (7, 10))
    assert (layout.numel, layout.sizes, layout.of(2)) == (10, (7, 0, 3), Range(7, 10))


def test_part_of_a_shard_layout_counts_from_its_window() -> None:
    layout = shard_layout(10, [4, 6], [1, 1])
    assert layout.part(Range(3, 7)).shards == ((0, 2), (2, 4))
    assert layout.part(Range(6, 9)).shards == ((0, 0), (0, 3))
