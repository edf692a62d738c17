"""Bytes of a plan's ranks, by hand and against the order of the compiled step."""

from __future__ import annotations

import pytest

from tests.random_plans import random_ministage_plan, random_plan
from tests.unit.simulated import HIDDEN, LENGTH, SAMPLE_BYTES, cluster, plan_of, setting_for
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan
from zorse_ds.core.recompute import first_of
from zorse_ds.cost.activations import activation_table
from zorse_ds.cost.layer_bytes import counted_bytes
from zorse_ds.cost.memory import hosts_overflow, memory_of
from zorse_ds.cost.moments import samples_in_flight
from zorse_ds.cost.setting import Setting
from zorse_ds.cost.state import StageParams, params_of, state_bytes
from zorse_ds.ranges import Range
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.simulator.peaks import peaks_of

NEAR = pytest.approx
MILLION = StageParams(10**6, 0)


@pytest.mark.parametrize(
    ("level", "parameters", "gathered", "optimizer", "opened", "reduced"),
    [
        (0, 2.0, 0.0, 12.0, 4.0, 4.0),
        (1, 2.0, 0.0, 3.0, 4.0, 4.0),
        (2, 2.0, 0.0, 3.0, 4.0, 1.0),
        (3, 0.5, 2.0, 3.0, 4.0, 1.0),
    ],
)
def test_state_of_a_quarter_share_in_bfloat16(
    level: int, parameters: float, gathered: float, optimizer: float, opened: float, reduced: float
) -> None:
    """Bytes a parameter: 2 in bfloat16, 4 of gradient, a master of 4 and two moments of 4."""
    found = state_bytes(MILLION, level, 0.25, "bfloat16")
    assert found.parameters == NEAR(parameters * 1e6)
    assert found.gathered == NEAR(gathered * 1e6)
    assert found.optimizer == NEAR(optimizer * 1e6)
    assert found.open_gradients == NEAR(opened * 1e6)
    assert found.reduced_gradients == NEAR(reduced * 1e6)
    assert found.host == 0


@pytest.mark.parametrize(
    ("level", "parameters", "gathered", "host"),
    [(0, 4.0, 0.0, 16.0), (2, 4.0, 0.0, 8.0), (3, 0.0, 4.0, 8.0)],
)
def test_offloaded_state_of_half_a_share_in_float32(
    level: int, parameters: float, gathered: float, host: float
) -> None:
    """In host memory: master 4, moments 8, reduced gradient 4, of the own part.

    At level 3 the shard is the master itself.
    """
    found = state_bytes(MILLION, level, 0.5, "float32", "params")
    assert (found.parameters, found.gathered) == (NEAR(parameters * 1e6), NEAR(gathered * 1e6))
    assert found.host == NEAR(host * 1e6)
    assert found.optimizer == 0


def test_float32_needs_no_master() -> None:
    assert state_bytes(MILLION, 2, 1.0, "float32").optimizer == NEAR(8e6)


def test_a_tied_head_is_a_copy_without_optimizer_state() -> None:
    model = ModelShape.llama("tied", 2, 64, 128, 4, vocab=100, tied=True)
    head, embedding = 64 * 100 + 64, 64 * 100
    assert params_of(model, Range(3, 4)) == StageParams(64, embedding)
    block = model.shapes[1].num_params
    assert params_of(model, Range(0, 4)).held == 2 * block + head
    assert params_of(model, Range(0, 2)) == StageParams(embedding + block, 0)
    copy = state_bytes(StageParams(0, 1000), 0, 1.0, "bfloat16")
    assert (copy.parameters, copy.optimizer, copy.open_gradients) == (2000, 0, 4000)


def test_most_samples_in_flight_is_a_window() -> None:
    assert samples_in_flight([1, 5, 2, 2, 4], 2) == 7
    assert samples_in_flight([1, 5, 2, 2, 4], 3) == 9
    assert samples_in_flight([3, 3], 9) == 6


def block_figures(size: int) -> tuple[int, int]:
    """Saved and workspace bytes of one block of the tests' model."""
    plan = plan_of({"a": {0: [1]}}, [("a", 1)])
    shape = setting_for(plan, cluster(1)).model.shapes[0]
    found = counted_bytes("block", shape, "float32", LENGTH, size)
    return found.saved, found.workspace


def test_activations_of_1f1b_are_those_in_flight() -> None:
    """Two stages of two layers, four micro-batches: the first holds two, the last one."""
    plan = plan_of({"a": {0: [3] * 4}, "b": {1: [3] * 4}}, [("a", 2), ("b", 2)])
    found = memory_of(plan, setting_for(plan, cluster(2)))
    saved, workspace = block_figures(3)
    assert found[0].activations == NEAR(2 * 2 * saved)
    assert found[1].activations == NEAR(2 * saved)
    # Backward of the second layer comes first, with the gradients of its output and its input.
    assert found[1].workspace == NEAR(workspace + 2 * 3 * SAMPLE_BYTES)


def test_gpipe_holds_all_micro_batches_and_recompute_their_inputs() -> None:
    plan = plan_of({"a": {0: [3, 2]}, "b": {1: [3, 2]}}, [("a", 2), ("b", 3)], "gpipe")
    saved, _ = block_figures(1)
    found = memory_of(plan, setting_for(plan, cluster(2)))
    assert found[1].activations == NEAR(5 * 3 * saved)
    plan = plan_of(
        {"a": {0: [3, 2]}, "b": {1: [3, 2]}}, [("a", 2), ("b", 3)], "gpipe", recompute="full"
    )
    found = memory_of(plan, setting_for(plan, cluster(2)))
    assert found[1].activations == NEAR(5 * 3 * SAMPLE_BYTES)


def test_recompute_every_second_layer_keeps_half_and_makes_two_anew() -> None:
    plan = plan_of({"a": {0: [1]}}, [("a", 6)])
    setting = setting_for(plan, cluster(1))
    table = activation_table(setting)
    some = Range(1, 5)
    every, second = (table.of(some, "float32", first_of(some, every=k)) for k in (1, 2))
    assert every.kept_per_sample == NEAR(4 * SAMPLE_BYTES)
    assert second.kept_per_sample == NEAR(2 * SAMPLE_BYTES)
    saved, _ = block_figures(1)
    assert second.extra_bytes(7) - every.extra_bytes(7) == NEAR(7 * saved)


def test_recompute_of_the_first_layers_keeps_the_others_whole() -> None:
    plan = plan_of({"a": {0: [1]}}, [("a", 6)])
    table = activation_table(setting_for(plan, cluster(1)))
    layers = Range(1, 5)
    saved, _ = block_figures(1)
    for number in range(5):
        found = table.of(layers, "float32", first_of(layers, number))
        assert found.kept_per_sample == NEAR(number * SAMPLE_BYTES + (4 - number) * saved)


def test_head_logits_are_there_once() -> None:
    """The last stage keeps float32 log-probabilities of each token."""
    model = ModelShape.llama("wide", 2, HIDDEN, 500, 5, vocab=50_000)
    plan = plan_of({"a": {0: [2]}, "b": {1: [2]}}, [("a", 3), ("b", 1)])
    found = memory_of(plan, setting_for(plan, cluster(2), model=model))
    logits = 4 * 50_000 * LENGTH * 2
    assert found[1].activations == NEAR(logits, rel=0.1)
    assert found[1].workspace >= 2 * logits


def test_two_stages_are_gathered_at_most() -> None:
    """Six ministages of one layer on one group of two: shards of all, whole ones of two."""
    plan = plan_of({"a": {0: [1], 1: [1]}}, [("a", 1)] * 6, "ministage", zero_level=3)
    setting = setting_for(plan, cluster(2))
    layer = 4 * setting.model.shapes[0].num_params
    assert memory_of(plan, setting)[0].parameters == NEAR(6 * layer / 2 + 2 * layer)


def test_overflow_is_what_is_missing() -> None:
    plan = plan_of({"a": {0: [1]}}, [("a", 3)])
    setting = setting_for(plan, cluster(1), reserve_bytes=16 << 30)
    found = memory_of(plan, setting)[0]
    assert not found.fits
    assert found.overflow_bytes == found.counted_bytes > 0
    assert memory_of(plan, setting_for(plan, cluster(1)))[0].overflow_bytes == 0


def test_ranks_of_a_node_share_its_host_memory() -> None:
    plan = plan_of({"a": {0: [1], 1: [1], 2: [1]}}, [("a", 3)], offload="params")
    hardware = cluster(2, 1, host_memory_gib=0.05)
    found = memory_of(plan, setting_for(plan, hardware))
    host = found[0].host_bytes
    assert host > 0
    limit = int(0.05 * 2**30)
    wanted = {0: 2 * host - limit, 1: host - limit}
    assert hosts_overflow(found, hardware) == {n: over for n, over in wanted.items() if over > 0}


def any_setting(plan: Plan) -> Setting:
    return setting_for(plan, cluster(plan.world_size))


@pytest.mark.parametrize("interleaved", [False, True], ids=["delayed", "interleaved"])
@pytest.mark.parametrize("seed", range(60))
def test_no_order_needs_more_than_the_plan_says(seed: int, interleaved: bool) -> None:
    """Along the very program of a rank the peak is never above, and mostly not far below."""
    offloads = ("none", "params", "params+activations")
    plans = [random_ministage_plan(seed, offloads=offloads)]
    if not interleaved:
        plans.append(random_plan(seed, zero_levels=(0, 1, 2)))
    for plan in plans:
        setting = any_setting(plan)
        bound = memory_of(plan, setting, interleaved=interleaved)
        exact = peaks_of(compile_trace(plan, interleaved=interleaved), setting)
        for rank, own in exact.items():
            assert own.counted_bytes <= bound[rank].counted_bytes
            assert own.host_bytes <= bound[rank].host_bytes
