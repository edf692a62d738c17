"""Collectives with uneven shards over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks.harness import run_ranks
from zorse_ds.core.shards import shard_layout
from zorse_ds.runtime import process_groups
from zorse_ds.runtime.process_groups import TorchProcessGroup, gather_shards

RANKS = (0, 1, 2, 3)
SIZES = (0, 1, 3, 10, 257, 900)
WEIGHTS = ((1, 1, 1, 1), (4, 3, 2, 1), (0, 5, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0), (0.1, 0, 7, 1))
BUCKETS = (40, 301, 4 * 1024 * 1024)


def contribution(rank: int, numel: int) -> Tensor:
    """Numbers of unlike size: a sum in another order gives other bits."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(numel, generator=generator) * 10 ** (2 * rank)


def exchanged(rank: int) -> list[tuple[Any, Tensor, Tensor, Tensor]]:
    """For each case: own shard of the sum, the same once more, and the gathered whole."""
    dist.init_process_group("gloo")
    group = TorchProcessGroup(rank, RANKS, dist.new_group(RANKS))
    results = []
    for bucket in BUCKETS:
        process_groups.BUCKET_NUMEL = bucket
        for numel in SIZES:
            for weights in WEIGHTS:
                layout = shard_layout(numel, RANKS, weights)
                own = contribution(rank, numel)
                first = group.reduce_shards(own.clone(), layout)
                again = group.reduce_shards(own.clone(), layout)
                whole = torch.full((numel,), float("nan"))
                whole[layout.of(rank).as_slice()] = first
                gather_shards(group, whole, layout)
                results.append(((bucket, numel, weights), first.clone(), again, whole))
    return results


@pytest.fixture(scope="module")
def results() -> list[list[tuple[Any, Tensor, Tensor, Tensor]]]:
    return run_ranks(4, exchanged, timeout_s=60)


def test_shards_hold_the_sum_in_rank_order(
    results: list[list[tuple[Any, Tensor, Tensor, Tensor]]],
) -> None:
    for rank, own in enumerate(results):
        for (_, numel, weights), first, _, _ in own:
            expected = contribution(0, numel)
            for other in RANKS[1:]:
                expected = expected + contribution(other, numel)
            shard = shard_layout(numel, RANKS, weights).of(rank)
            assert torch.equal(first, expected[shard.as_slice()])


def test_the_same_reduction_gives_the_same_bits(
    results: list[list[tuple[Any, Tensor, Tensor, Tensor]]],
) -> None:
    assert all(torch.equal(first, again) for own in results for _, first, again, _ in own)


def test_everybody_gathers_everything(
    results: list[list[tuple[Any, Tensor, Tensor, Tensor]]],
) -> None:
    for (case, _, _, whole), *others in zip(*results, strict=True):
        assert not whole.isnan().any(), case
        assert all(torch.equal(whole, other) for _, _, _, other in others), case


def of_several_kinds(rank: int) -> list[Tensor]:
    dist.init_process_group("gloo")
    single = TorchProcessGroup(rank, (rank,), None)
    pair = dist.new_group([0, 2])
    largest = torch.tensor([float(rank), -float(rank)])
    TorchProcessGroup(rank, (0, 1, 2), None).all_reduce(largest, "max")
    alone = torch.tensor([5.0])
    single.all_reduce(alone)
    gather_shards(single, alone, shard_layout(1, (rank,), [1]))
    reduced = single.reduce_shards(alone, shard_layout(1, (rank,), [1]))
    found = [largest, alone, reduced]
    if rank != 1:
        layout = shard_layout(5, (0, 2), [1, 4])
        group = TorchProcessGroup(rank, (0, 2), pair)
        low = torch.arange(5, dtype=torch.bfloat16) * (rank + 1)
        found.append(group.reduce_shards(low, layout))
    return found


def test_groups_of_one_of_some_and_of_all() -> None:
    first, second, third = run_ranks(3, of_several_kinds, timeout_s=30)
    for largest, alone, reduced, *_ in (first, second, third):
        assert largest.tolist() == [2.0, 0.0]
        assert alone.tolist() == reduced.tolist() == [5.0]
    assert torch.cat([first[3], third[3]]).tolist() == [0, 4, 8, 12, 16]


def in_sixteen_bits(rank: int) -> list[Tensor]:
    dist.init_process_group("gloo")
    group = TorchProcessGroup(rank, RANKS, dist.new_group(RANKS))
    process_groups.BUCKET_NUMEL = 40
    layout = shard_layout(257, RANKS, (4, 3, 0, 1))
    own = contribution(rank, 257)
    return [group.reduce_shards(own, layout, wire) for wire in (torch.bfloat16, torch.float16)]


def test_what_travels_in_sixteen_bits_is_rounded_once_and_summed_in_float32() -> None:
    shards = run_ranks(4, in_sixteen_bits, timeout_s=30)
    for i, dtype in enumerate((torch.bfloat16, torch.float16)):
        expected = contribution(0, 257).to(dtype).float()
        for rank in RANKS[1:]:
            expected = expected + contribution(rank, 257).to(dtype).float()
        assert torch.equal(torch.cat([own[i] for own in shards]), expected)
