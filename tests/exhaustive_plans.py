"""Every plan of the planner's space for a small cluster: the judge of the planner's search.

Divisions of the GPUs, orders of the groups, layers of every stage and micro-batch sizes are
enumerated; samples follow from the planner's balance. A draft whose busiest rank alone needs longer
than the best plan so far is not simulated, which loses none.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations, product

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.gpus import gpu_types
from zorse_ds.core.model import LayerShape, ModelShape
from zorse_ds.core.plan import Dtype
from zorse_ds.cost.memory import memory_of
from zorse_ds.cost.setting import PassTimes, Setting
from zorse_ds.planner.draft import Draft, GroupDraft, plan_of, sample_seconds
from zorse_ds.planner.fit import with_weights
from zorse_ds.planner.groupings import normal
from zorse_ds.planner.options import group_dtype
from zorse_ds.planner.settings import AHEADS, SIZES, rungs
from zorse_ds.planner.shares import balanced
from zorse_ds.planner.units import Unit, looks_of, signature_of, units_of
from zorse_ds.simulator.quick import quick_step_s

TYPES = ("A100-SXM-40GB", "A10G", "V100-SXM2-16GB", "T4", "L4", "A6000")


def peak_timer(
    gpu_type: str, kind: str, shape: LayerShape, dtype: Dtype, seq_len: int, size: int
) -> PassTimes:
    """Half of the vendor's FLOP/s, and a fixed part."""
    seconds = shape.forward_flops(seq_len) / (0.5 * gpu_types()[gpu_type].tensor_flops)
    return PassTimes(seconds * size + 3e-4, 2 * seconds * size + 5e-4, "estimated")


@dataclass(frozen=True)
class Problem:
    """A small planning problem."""

    setting: Setting
    batch: int


def random_problem(seed: int) -> Problem:
    """Two to six GPUs of up to three types in up to three nodes, four to ten layers."""
    draw = random.Random(seed)
    num_gpus = draw.choice((2, 3, 3, 4, 4, 5, 6))
    kinds = draw.sample(TYPES, draw.choice((1, 2, 2, 3)) if num_gpus < 6 else draw.choice((1, 2)))
    cuts = sorted(draw.sample(range(1, num_gpus), min(draw.choice((0, 1, 2)), num_gpus - 1)))
    bounds = [0, *cuts, num_gpus]
    nodes = [
        {
            "gpu_types": [draw.choice(kinds) for _ in range(stop - start)],
            "intra_gb_per_s": draw.choice((8, 25, 150)),
            "nic_gb_per_s": draw.choice((0.6, 3, 12)),
        }
        for start, stop in pairwise(bounds)
    ]
    blocks = draw.randint(2, 8) if num_gpus < 5 else draw.randint(2, 5)
    model = ModelShape.llama("small", blocks, 1024 * draw.choice((1, 2, 4)), 8192, 16)
    setting = Setting(Cluster.from_dict({"nodes": nodes}), model, peak_timer, 512)
    return Problem(setting, draw.choice((6, 8, 12)))


def best_step_s(problem: Problem, below: float) -> float:
    """Seconds of the fastest plan that fits, or `below` when none is faster than that."""
    best = below
    for shape in _shapes(problem.setting):
        bounds = [_bounds(shape, i, problem) for i in range(len(shape.groups))]
        quick = [[size for size, bound in own.items() if bound < best] for own in bounds]
        for sizes in product(*quick):
            draft = shape
            for i, size in enumerate(sizes):
                draft = draft.with_group(i, replace(draft.groups[i], size=size))
            best = min(best, _best_settled_s(draft, problem, best))
    return best


def _best_settled_s(draft: Draft, problem: Problem, best: float) -> float:
    for settled in _settled(draft, problem):
        if max(_bound(settled, i, problem) for i in range(len(draft.groups))) < best:
            plan = plan_of(settled, problem.setting, problem.batch)
            if all(own.fits for own in memory_of(plan, problem.setting).values()):
                best = min(best, quick_step_s(plan, problem.setting))
    return best


def _bounds(shape: Draft, index: int, problem: Problem) -> dict[int, float]:
    """For each micro-batch size the least that the group computes."""
    group = shape.groups[index]
    bounds = {}
    for size in SIZES:
        # A size beyond every rank's samples is like the one before.
        if size == 1 or len(group.ranks) * size < 2 * problem.batch:
            bounds[size] = _bound(
                shape.with_group(index, replace(group, size=size)), index, problem
            )
    return bounds


def _bound(draft: Draft, index: int, problem: Problem) -> float:
    """What the busiest rank of a group computes: no step is shorter."""
    costs = sample_seconds(draft, index, problem.setting)
    parts = balanced(problem.batch, costs)
    return max(part * cost for part, cost in zip(parts, costs, strict=True))


def _settled(draft: Draft, problem: Problem) -> Iterator[Draft]:
    """Every choice of settings that fits; the cheapest alone where all groups can have it."""
    ladders = [rungs(draft, i, problem.setting, problem.batch) for i in range(len(draft.groups))]
    cheapest = draft
    for i, ladder in enumerate(ladders):
        cheapest = cheapest.with_group(i, ladder[0])
    fit = with_weights(cheapest, problem.setting, problem.batch)
    if not fit.overflow_bytes:
        yield fit.draft
        return
    for choice in product(*ladders):
        settled = draft
        for i, group in enumerate(choice):
            settled = settled.with_group(i, group)
        fit = with_weights(settled, problem.setting, problem.batch)
        if not fit.overflow_bytes:
            yield fit.draft


def _shapes(setting: Setting) -> Iterator[Draft]:
    """Drafts without recompute and with micro-batches of one sample."""
    looks = looks_of(setting.cluster)
    seen = set()
    for groups in _divisions(units_of(setting.cluster)):
        if len(groups) > setting.model.num_layers:
            continue
        for ordered in permutations(groups):
            signature = signature_of(ordered, looks)
            if signature not in seen:
                seen.add(signature)
                yield from _cuts(ordered, setting)


def _cuts(ordered: tuple[tuple[Unit, ...], ...], setting: Setting) -> Iterator[Draft]:
    for visits in (1, 2, 3):
        groups = tuple(
            GroupDraft(units, 1, group_dtype(units, setting), recompute=(False,) * visits)
            for units in ordered
        )
        schedule = "1f1b" if visits == 1 else "ministage"
        for layers in _compositions(setting.model.num_layers, visits, len(ordered)):
            yield from (Draft(schedule, groups, layers, ahead) for ahead in AHEADS)


def _compositions(total: int, visits: int, groups: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every cut of the layers into stages of one layer or more."""
    stages = visits * groups
    for cuts in combinations(range(1, total), stages - 1):
        bounds = (0, *cuts, total)
        sizes = [stop - start for start, stop in pairwise(bounds)]
        yield tuple(tuple(sizes[v * groups : (v + 1) * groups]) for v in range(visits))


def _divisions(units: tuple[Unit, ...]) -> Iterator[tuple[tuple[Unit, ...], ...]]:
    """Every set partition of the GPUs."""
    singles = [replace(unit, ranks=(rank,)) for unit in units for rank in unit.ranks]

    def grow(done: list[list[Unit]], rest: list[Unit]) -> Iterator[tuple[tuple[Unit, ...], ...]]:
        if not rest:
            yield normal(done)
            return
        for i in range(len(done)):
            yield from grow([*done[:i], [*done[i], rest[0]], *done[i + 1 :]], rest[1:])
        yield from grow([*done, rest[:1]], rest[1:])

    yield from grow([], singles)
