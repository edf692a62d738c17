"""Seconds of layers, messages and collectives, by hand."""

from __future__ import annotations

import pytest

from tests.unit.simulated import LENGTH, cluster, equal_blocks, linear
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.gpus import gpu_types
from zorse_ds.core.model import LayerShape, ModelShape
from zorse_ds.core.plan import Dtype
from zorse_ds.core.recompute import first_of
from zorse_ds.cost.collectives import all_reduce, gather, reduce_scatter
from zorse_ds.cost.compute import backward_s, best_samples_per_s, forward_s
from zorse_ds.cost.dtypes import usable_dtype
from zorse_ds.cost.network import Network
from zorse_ds.cost.setting import PassTimes, Setting
from zorse_ds.ranges import Range

NEAR = pytest.approx
MB = 1e6


def by_role(
    gpu_type: str, kind: str, shape: LayerShape, dtype: Dtype, seq_len: int, size: int
) -> PassTimes:
    """Forward 1, 10, 100 s a sample of embedding, block, head, backward 3 times that."""
    seconds = {"embedding": 1.0, "block": 10.0, "head": 100.0}[shape.role] * size
    return PassTimes(seconds, 3 * seconds, "measured")


def llama_setting(**more: object) -> Setting:
    model = ModelShape.llama("small", 3, 64, 128, 4, vocab=100)
    return Setting(cluster(2), model, by_role, LENGTH, **more)  # type: ignore[arg-type]


def test_passes_are_sums_over_layers() -> None:
    setting = llama_setting()
    assert forward_s(setting, 0, Range(0, 5), 2) == NEAR(2 * 131)
    assert forward_s(setting, 1, Range(1, 3), 1) == NEAR(20)
    assert backward_s(setting, 0, Range(3, 5), 1) == NEAR(330)
    assert backward_s(setting, 0, Range(2, 2), 1) == 0.0


def test_recompute_repeats_the_blocks_whatever_the_interval() -> None:
    setting = llama_setting()
    whole = Range(0, 5)
    for interval in (1, 3):
        again = first_of(whole, every=interval)
        assert backward_s(setting, 0, whole, 1, again) == NEAR(3 * 131 + 30)
    assert backward_s(setting, 0, whole, 1, first_of(whole, 3)) == NEAR(3 * 131 + 20)
    every = llama_setting(recomputed=("embedding", "block", "head"))
    assert backward_s(every, 0, whole, 1, first_of(whole)) == NEAR(4 * 131)


def test_best_size_is_looked_for() -> None:
    """A pass costs 10 s and 1 s a sample: the larger the better, up to 16."""

    def timer(*args: object) -> PassTimes:
        size = args[-1]
        assert isinstance(size, int)
        return PassTimes(10.0 + size, 0.0, "measured")

    setting = Setting(cluster(1), equal_blocks(1), timer, LENGTH)
    assert best_samples_per_s(setting, "X", "float32") == NEAR(16 / (2 * 26))


@pytest.mark.parametrize(
    ("name", "found"), [("A100-SXM-40GB", "bfloat16"), ("T4", "float16"), ("P40", "float32")]
)
def test_bfloat16_where_there_is_none(name: str, found: Dtype) -> None:
    assert usable_dtype("bfloat16", gpu_types()[name]) == found
    assert usable_dtype("float16", gpu_types()[name]) == "float16"


def two_nodes(**nic: float) -> Network:
    """Two nodes of two: 10 MB/s inside, 2 MB/s between, 1 ms and 5 ms."""
    return Network(
        cluster(
            2,
            2,
            intra_gb_per_s=0.01,
            intra_latency_us=1000.0,
            nic_gb_per_s=nic.get("gb_per_s", 0.002),
            nic_latency_us=5000.0,
        )
    )


def test_messages_take_latency_and_the_slowest_lane() -> None:
    network = two_nodes()
    assert network.transfer_s(0, 1, 5 * MB) == NEAR(0.001 + 0.5)
    assert network.transfer_s(0, 2, 5 * MB) == NEAR(0.005 + 2.5)


def test_measured_links_and_regions_replace_what_nics_say() -> None:
    data = cluster(1, 1, 1, nic_gb_per_s=0.01).to_dict()
    data["links"] = [{"nodes": [0, 1], "gb_per_s": 0.001, "latency_us": 7000}]
    data["nodes"][2]["region"] = "far"
    data |= {"inter_region_gb_per_s": 0.0005, "inter_region_gb_per_s_is": "per_node"}
    network = Network(Cluster.from_dict(data))
    assert network.transfer_s(0, 1, MB) == NEAR(0.007 + 1)
    assert network.transfer_s(1, 0, MB) == NEAR(0.007 + 1)
    assert network.transfer_s(1, 2, MB) == NEAR(0.030 + 2)


def test_a_ring_crosses_each_nic_once_a_direction() -> None:
    """Four equal shards of 1 MB: over each hop go three, over the NIC at 2 MB/s."""
    network = two_nodes()
    for kind in (gather, reduce_scatter):
        found = kind(network, (0, 1, 2, 3), [MB] * 4)
        assert found.seconds == NEAR(3 * 0.005 + 3 / 2)
        busy = {
            network.lanes[lane].key: s for lane, s in zip(found.lanes, found.busy_s, strict=True)
        }
        assert busy[("nic out", 0)] == busy[("nic in", 0)] == NEAR(1.5)
        assert busy[("gpu out", 0)] == NEAR(0.3)


def test_uneven_shards() -> None:
    """Inside a node of 10 MB/s. Gathered, a member gets all but its own; summed, it sends that."""
    network = two_nodes()
    shards = [3 * MB, 0.0]
    # To rank 1 go 3 MB, to rank 0 nothing.
    found = gather(network, (0, 1), shards)
    busy = {network.lanes[lane].key: s for lane, s in zip(found.lanes, found.busy_s, strict=True)}
    assert (busy[("gpu out", 0)], busy[("gpu out", 1)]) == (NEAR(0.3), 0.0)
    # Rank 1 sends what rank 0 keeps, rank 0 nothing.
    found = reduce_scatter(network, (0, 1), shards)
    busy = {network.lanes[lane].key: s for lane, s in zip(found.lanes, found.busy_s, strict=True)}
    assert (busy[("gpu out", 0)], busy[("gpu out", 1)]) == (0.0, NEAR(0.3))


def test_all_reduce_is_both_and_alone_there_is_nothing_to_do() -> None:
    network = two_nodes()
    one = gather(network, (0, 1), [MB, MB]).seconds
    two = reduce_scatter(network, (0, 1), [MB, MB]).seconds
    assert all_reduce(network, (0, 1), 2 * MB).seconds == NEAR(one + two)
    assert gather(network, (1,), [MB]).seconds == 0.0


def test_linear_timer_scales() -> None:
    setting = Setting(cluster(1), equal_blocks(4), linear(0.5, 1.0), LENGTH)
    assert forward_s(setting, 0, Range(1, 3), 4) == NEAR(4.0)
