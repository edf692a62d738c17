"""Which exact form of an uneven gather is the quickest here?

    python -m benchmarks.collectives [--ranks 4] [--numel 4000000]

Each form fills a flat vector with every rank's shard. `TorchProcessGroup` takes the first: with
megabytes to gather over gloo, padding and all-to-all are slower, and messages pair by pair are
slower with two ranks and within noise with four, so there is nothing to choose. Sums of gradients
have one form, for their order is fixed.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tests.ranks.harness import run_ranks
from zorse_ds.core.shards import ShardLayout, shard_layout
from zorse_ds.runtime.process_groups import TorchProcessGroup, gather_shards

Form = Callable[[int, Tensor, ShardLayout], None]


def broadcasts(rank: int, flat: Tensor, layout: ShardLayout) -> None:
    """One broadcast a shard into its place, all under way at once: the product's form."""
    gather_shards(TorchProcessGroup(rank, layout.ranks, None), flat, layout)


def padded(rank: int, flat: Tensor, layout: ShardLayout) -> None:
    """One gather of shards padded to the largest, then copies into place."""
    largest = max(layout.sizes)
    own = flat[layout.of(rank).as_slice()]
    sent = flat.new_zeros(largest)
    sent[: own.numel()] = own
    received = flat.new_empty(len(layout.ranks), largest)
    dist.all_gather(list(received), sent)
    for row, shard in zip(received, layout.shards, strict=True):
        flat[shard.as_slice()] = row[: shard.size]


def all_to_all(rank: int, flat: Tensor, layout: ShardLayout) -> None:
    """Every rank sends its shard to each other rank in one all-to-all."""
    own = flat[layout.of(rank).as_slice()]
    dist.all_to_all_single(
        flat, own.repeat(len(layout.ranks)), list(layout.sizes), [own.numel()] * len(layout.ranks)
    )


def messages(rank: int, flat: Tensor, layout: ShardLayout) -> None:
    """A send and a receive for each pair of ranks, all under way at once."""
    pairs = list(zip(layout.ranks, layout.shards, strict=True))
    own = flat[layout.of(rank).as_slice()]
    works = [dist.irecv(flat[s.as_slice()], owner) for owner, s in pairs if owner != rank]
    works += [dist.isend(own, other) for other in layout.ranks if other != rank]
    for work in works:
        if work is not None:
            work.wait()


FORMS: tuple[Form, ...] = (broadcasts, padded, all_to_all, messages)
WEIGHTS = {
    "equal": lambda rank: 1.0,
    "1 : 2 : 3 …": lambda rank: rank + 1.0,
    "one has 0": lambda rank: float(rank > 0),
    "10 : 1 : 1 …": lambda rank: 10.0 if rank == 0 else 1.0,
}


def measure(rank: int, ranks: int, numel: int, rounds: int) -> dict[tuple[str, str], float]:
    """(weights, form) → the quickest of some rounds, in seconds; forms run in turns."""
    dist.init_process_group("gloo")
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, weight in WEIGHTS.items():
        layout = shard_layout(numel, range(ranks), [weight(i) for i in range(ranks)])
        for _ in range(rounds):
            for form in FORMS:
                flat = torch.full((numel,), float(rank))
                dist.barrier()
                start = time.perf_counter()
                form(rank, flat, layout)
                dist.barrier()
                times[name, form.__name__].append(time.perf_counter() - start)
                owners = zip(layout.ranks, layout.shards, strict=True)
                assert all((flat[shard.as_slice()] == owner).all() for owner, shard in owners)
    return {key: min(seconds) for key, seconds in times.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--numel", type=int, default=4_000_000, help="of float32")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    results = run_ranks(args.ranks, measure, args.ranks, args.numel, args.rounds, timeout_s=600)
    table = Table("shard weights", *(f"{form.__name__} (ms)" for form in FORMS))
    for name in WEIGHTS:
        slowest = (max(own[name, form.__name__] for own in results) for form in FORMS)
        table.add_row(name, *(f"{1e3 * seconds:.1f}" for seconds in slowest))
    Console().print(table)


if __name__ == "__main__":
    main()
