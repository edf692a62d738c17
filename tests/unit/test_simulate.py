"""The simulator against textbook forms and timelines worked out by hand."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest

from tests.random_plans import random_ministage_plan, random_plan, uniform_plan
from tests.unit.simulated import (
    SAMPLE_BYTES,
    cluster,
    layers_for,
    linear,
    plan_of,
    random_cluster,
    setting_for,
)
from zorse_ds.core.plan import Plan
from zorse_ds.cost.layer_bytes import counted_bytes
from zorse_ds.errors import PlanError
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.simulator.quick import quick_step_s
from zorse_ds.simulator.simulate import Simulation, ceiling_samples_per_s, simulate
from zorse_ds.simulator.timeline import Span

NEAR = pytest.approx


def simulated(plan: Plan, *nodes: int, **figures: float) -> Simulation:
    hardware = cluster(*(nodes or (plan.world_size,)), **figures)
    return simulate(compile_trace(plan), setting_for(plan, hardware))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (2, 1), (3, 4), (4, 12), (5, 7)])
def test_uniform_pipelines_take_the_textbook_time(
    stages: int, micro_batches: int, schedule: str
) -> None:
    """(m + p - 1) · (f + b), so a bubble of (p - 1) / (m + p - 1)."""
    found = simulated(uniform_plan(stages, 1, micro_batches, schedule))
    assert found.step_s == NEAR((micro_batches + stages - 1) * 3.0)
    assert found.bubble_share == NEAR((stages - 1) / (micro_batches + stages - 1))


def test_ministages_fill_each_visit() -> None:
    """Two ranks, two stages each, plain order: each rank runs m micro-batches a visit.

    The first visit of rank 1 starts one forward late; it ends (m + 1) · f; the second visits
    follow without a gap for m ≥ 2, the whole is 4·m·(f + b) / 2 and one of each on both sides.
    """
    stages = [("a", 1), ("b", 1), ("a", 1), ("b", 1)]
    plan = plan_of({"a": {0: [1] * 4}, "b": {1: [1] * 4}}, stages, "ministage")
    plan = plan.model_copy(update={"turnaround": False})
    assert simulated(plan).step_s == NEAR(2 * 4 * 3.0 + 1 + 2)


def test_a_messages_way_is_latency_and_the_slowest_lane() -> None:
    """Two ranks on two nodes, one micro-batch of 3 samples: there and back over 2 MB/s."""
    plan = plan_of({"a": {0: [3]}, "b": {1: [3]}}, [("a", 1), ("b", 1)])
    found = simulated(plan, 1, 1, nic_gb_per_s=0.002, nic_latency_us=250_000)
    wire_s = 0.25 + 3 * SAMPLE_BYTES / 2e6
    # The gradient norm is agreed on at the end: latency there and back.
    assert found.step_s == NEAR(2 * 9.0 + 2 * wire_s + 2 * 0.25)
    forward = next(span for span in found.background.spans if span.name == "SendActivation")
    assert (forward.rank, forward.start_s, forward.stop_s) == (0, NEAR(3.0), NEAR(3.0 + wire_s))


def test_staged_messages_are_copied_to_the_host_and_back() -> None:
    """Beside a second on the wire, a megabyte at 4 MB/s on either side."""
    plan = plan_of({"a": {0: [1]}, "b": {1: [1]}}, [("a", 1), ("b", 1)], transport="staged")
    found = simulated(plan, 1, 1, nic_gb_per_s=0.001, host_gb_per_s=0.004)
    assert {round(s.stop_s - s.start_s, 9) for s in found.background.spans} == {1.5}


def test_offloaded_activations_are_copied_both_ways() -> None:
    """Every pass takes what its samples save over 10 MB/s longer."""
    figures = {"host_gb_per_s": 0.01}
    plain = simulated(plan_of({"a": {0: [2]}}, [("a", 1)], offload="params"), 1, **figures)
    moved = plan_of({"a": {0: [2]}}, [("a", 1)], offload="params+activations")
    found = simulated(moved, 1, **figures)
    saved = counted_bytes("block", layers_for(moved).shapes[0], "float32", 1000, 2).saved
    assert found.step_s - plain.step_s == NEAR(2 * saved / 1e7)


def test_messages_of_two_ranks_share_their_nodes_nic() -> None:
    """Ranks 0, 1 send at once at 1 s; the NIC takes 4 s a sample, first for the lower rank."""
    plan = plan_of({"a": {0: [1], 1: [1]}, "b": {2: [1], 3: [1]}}, [("a", 1), ("b", 1)])
    found = simulated(plan, 2, 2, nic_gb_per_s=0.00025)
    sends = [s for s in found.background.spans if s.name == "SendActivation"]
    assert [(s.rank, s.start_s, s.stop_s) for s in sends] == [
        (0, NEAR(1.0), NEAR(5.0)),
        (1, NEAR(5.0), NEAR(9.0)),
    ]
    # Rank 2 is done at 5 + 3, and sends back at once: the other direction is free.
    grads = [s for s in found.background.spans if s.name == "SendGrad"]
    assert [(s.rank, s.start_s, s.stop_s) for s in grads] == [
        (2, NEAR(8.0), NEAR(12.0)),
        (3, NEAR(12.0), NEAR(16.0)),
    ]
    assert found.lane_share["nic out 0"] == NEAR(8.0 / found.step_s)


def test_messages_overlap_with_passes() -> None:
    """Rank 0 goes on while its message is under way; rank 1 waits for each of them."""
    plan = plan_of({"a": {0: [1, 1, 1]}, "b": {1: [1, 1, 1]}}, [("a", 1), ("b", 1)], "gpipe")
    found = simulated(plan, 1, 1, nic_gb_per_s=0.0005)
    forwards = [s for s in found.timeline.spans if s.name == "ForwardPass"]
    assert [s.start_s for s in forwards if s.rank == 0] == [NEAR(0.0), NEAR(1.0), NEAR(2.0)]
    assert [s.start_s for s in forwards if s.rank == 1] == [NEAR(3.0), NEAR(5.0), NEAR(7.0)]


def test_ceiling_is_all_layers_with_recompute_on_each_gpu() -> None:
    """Two layers of 1 + 2 s a sample: 1 / (2·2 + 4) samples a second, on three GPUs."""
    plan = plan_of({"a": {0: [1], 1: [1], 2: [1]}}, [("a", 2)])
    setting = setting_for(plan, cluster(3))
    assert ceiling_samples_per_s(setting) == NEAR(3 / 8)
    found = simulate(compile_trace(plan), setting)
    assert found.ceiling_share == NEAR((3 / 6) / (3 / 8))
    assert found.tokens_per_s == NEAR(3 / 6 * 1000)


def test_a_plan_for_more_ranks_than_there_are_is_one_sentence() -> None:
    plan = uniform_plan(2, 2, 2)
    with pytest.raises(PlanError, match=r"^the plan has 4 ranks, but the cluster has 3 GPUs; "):
        simulated(plan, 3)


def cases(count: int) -> list[tuple[int, Plan]]:
    random_ones = [(seed, random_plan(seed, zero_levels=(0, 1, 2, 3))) for seed in range(count)]
    ministages = [(seed, random_ministage_plan(seed)) for seed in range(count)]
    return [*random_ones, *ministages]


IDS = [f"{plan.schedule}-{seed}" for seed, plan in cases(40)]


def run(seed: int, plan: Plan, *, record: bool = True, interleaved: bool = False) -> Simulation:
    setting = setting_for(plan, random_cluster(seed, plan.world_size), linear(0.3, 0.7))
    return simulate(compile_trace(plan, interleaved=interleaved), setting, record=record)


@pytest.mark.parametrize(("seed", "plan"), cases(40), ids=IDS)
def test_nothing_is_in_two_places_at_once(seed: int, plan: Plan) -> None:
    found = run(seed, plan)
    by_rank = sorted(found.timeline.spans, key=lambda span: (span.rank, span.start_s))
    for _, spans in groupby(by_rank, key=lambda span: span.rank):
        assert_apart([(span.start_s, span.stop_s) for span in spans])
    by_lane = sorted(found.lane_uses, key=lambda use: (use.lane, use.start_s))
    for lane, uses in groupby(by_lane, key=lambda use: use.lane):
        own = [(use.start_s, use.stop_s) for use in uses]
        assert_apart(own)
        busy = sum(stop - start for start, stop in own)
        assert found.lane_share.get(found.lane_names[lane], 0.0) == NEAR(busy / found.step_s)


def assert_apart(times: list[tuple[float, float]]) -> None:
    assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(times))


@pytest.mark.parametrize(("seed", "plan"), cases(40), ids=IDS)
def test_every_pass_runs_once_and_takes_its_time(seed: int, plan: Plan) -> None:
    trace = compile_trace(plan)
    found = run(seed, plan)

    def key(span: Span) -> tuple[str, int, int | None, int | None]:
        return span.name, span.rank, span.stage, span.micro_batch

    passes = [s for s in found.timeline.spans if s.name in ("ForwardPass", "BackwardPass")]
    wanted = [
        (f"{each.phase.capitalize()}Pass", each.rank, each.stage, each.micro_batch)
        for each in trace.order
    ]
    assert sorted(map(key, passes)) == sorted(wanted)
    opened: set[tuple[int, int]] = set()
    for span in passes:
        assert span.stage is not None and span.micro_batch is not None
        size = trace.layout.micro_batches[span.stage][span.micro_batch].samples.size
        layers = plan.stages[span.stage].layers.size
        again = 0
        if plan.recompute_of(span.stage) == "full":
            again = min(layers, plan.group_of_stage(span.stage).recompute_layers or layers)
        forward = span.name == "ForwardPass"
        seconds = (0.3 * layers if forward else 0.7 * layers + 0.3 * again) * size
        if span.name == "BackwardPass" and (span.rank, span.stage) not in opened:
            opened.add((span.rank, span.stage))
            # Gradients are zeroed first, at 50 MB/s.
            seconds += layers * 4 * layers_for(plan).shapes[0].num_params / 0.05e9
        assert span.stop_s - span.start_s == NEAR(seconds)


@pytest.mark.parametrize("interleaved", [False, True], ids=["delayed", "interleaved"])
@pytest.mark.parametrize(("seed", "plan"), cases(40), ids=IDS)
def test_what_is_not_recorded_and_the_quick_way_take_the_same_time(
    seed: int, plan: Plan, interleaved: bool
) -> None:
    found = run(seed, plan, interleaved=interleaved)
    plain = run(seed, plan, record=False, interleaved=interleaved)
    assert (plain.step_s, plain.busy_share) == (found.step_s, found.busy_share)
    assert not plain.timeline.spans
    setting = setting_for(plan, random_cluster(seed, plan.world_size), linear(0.3, 0.7))
    assert quick_step_s(plan, setting, interleaved=interleaved) == found.step_s


def test_ranks_without_samples_run_ahead_of_gathers() -> None:
    """They reach the second gather of a stage before the others reach the first."""

    def step_s(idle: int) -> float:
        shares = [{"rank": 2 + i, "micro_batches": []} for i in range(idle)]
        wide = [{"rank": 0, "micro_batches": [1]}, *shares]
        groups = [
            {"name": "wide", "zero_level": 3, "gpus": wide},
            {"name": "deep", "gpus": [{"rank": 1, "micro_batches": [1]}]},
        ]
        stages = [{"group": ("wide", "deep")[i % 2], "layers": [i, i + 1]} for i in range(10)]
        data = {"global_batch_size": 1, "schedule": "ministage"}
        return simulated(Plan.from_dict({**data, "groups": groups, "stages": stages})).step_s

    assert step_s(2) == NEAR(step_s(0), rel=1e-3)
