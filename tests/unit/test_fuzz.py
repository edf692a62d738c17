"""Whatever stands in the files that a user writes, only the product's own errors come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given

from tests.fuzzing import as_json, fuzzed, near, only_own_errors, texts
from tests.random_plans import random_plan_dict
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.cluster_files import cluster_from, example_clusters
from zorse_ds.core.hostfile import parse_hostfile, slots_of
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan
from zorse_ds.core.profile import Profile
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.schedule.compile import compile_trace

PLANS = [random_plan_dict(seed) for seed in range(20)]
MINISTAGES = [
    random_plan_dict(seed, schedules=("ministage",), zero_levels=(0, 1, 2, 3)) for seed in range(20)
]
CLUSTERS: list[dict[str, Any]] = [
    *(cluster_from(name).to_dict() for name in example_clusters()),
    {
        "inter_region_gb_per_s": 0.1,
        "inter_region_gb_per_s_is": "per_link",
        "links": [{"nodes": [0, 1], "gb_per_s": 1.0, "latency_us": 5.0}],
        "types": {
            "own": {"tensor_tflops": 20, "fp32_tflops": 10, "memory_gib": 8, "memory_gb_per_s": 300}
        },
        "nodes": [
            {"name": "a", "gpu_types": ["T4", "A10G"], "intra_gb_per_s": 5, "nic_gb_per_s": 1},
            {
                "name": "b",
                "gpu_type": "T4",
                "num_gpus": 2,
                "intra_gb_per_s": 5.0,
                "nic_gb_per_s": 1.0,
                "region": "east",
                "price_per_hour": 1.5,
            },
        ],
    },
]
SHAPE = ModelShape.llama("small", 4, 512, 1408, 8)
SHAPES = [SHAPE.model_dump(mode="json", exclude_defaults=True)]
PROFILES = [
    {
        "model": SHAPES[0],
        "times": [
            {
                "gpu_type": "T4",
                "kind": "block",
                "dtype": "float16",
                "seq_len": 128,
                "micro_batches": [1, 2, 4],
                "forward_s": [0.1, 0.2, 0.4],
                "backward_s": [0.2, 0.4, 0.8],
            }
        ],
        "bytes": [
            {
                "kind": "block",
                "dtype": "float16",
                "seq_len": 128,
                "saved_bytes": 10,
                "boundary_bytes": 5,
                "workspace_bytes": 7,
            }
        ],
        "optimizer": [{"gpu_type": "T4", "step_s_per_param": 1e-9}],
        "versions": {"torch": "2"},
    }
]
HOSTFILES = [
    "a slots=2 gpu_type=T4\nb slots=1 gpu_type=A10G nic_gb_per_s=1.5 region=east\n",
    "# comment\nworker-1 slots=3 gpu_type=T4,T4,A10G host_memory_gib=64 price_per_hour=0\n\n",
]
SMALL = 2000
"""Instructions; a plan of a million micro-batches is no mistake, but takes its time."""


def read_plan(data: Any) -> None:
    plan = Plan.from_dict(data)
    assert Plan.from_dict(plan.to_dict()) == plan
    micro_batches = sum(len(gpu.micro_batches) for group in plan.groups for gpu in group.gpus)
    if micro_batches * len(plan.stages) < SMALL:
        compile_trace(plan)


def read_cluster(data: Any) -> None:
    cluster = Cluster.from_dict(data)
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    if 1 < len(cluster.gpus) < SMALL:
        assert cluster.path(0, len(cluster.gpus) - 1).bytes_per_s > 0
        cluster.without([0])
        cluster.with_added("2xT4@1.2")


def read_profile(data: Any) -> None:
    profile = Profile.from_dict(data)
    shape = profile.model.kinds.get("block")
    if shape is not None:
        for entry in profile.times:
            timer_of(profile)(entry.gpu_type, "block", shape, entry.dtype, 64, 3)


@fuzzed
@given(near([*PLANS, *MINISTAGES]))
def test_plans(data: Any) -> None:
    only_own_errors(lambda: read_plan(data))


@fuzzed
@given(near(CLUSTERS))
def test_clusters(data: Any) -> None:
    only_own_errors(lambda: read_cluster(data))


@fuzzed
@given(near(SHAPES))
def test_shapes(data: Any) -> None:
    only_own_errors(lambda: ModelShape.from_dict(data))


@fuzzed
@given(near(PROFILES))
def test_profiles(data: Any) -> None:
    only_own_errors(lambda: read_profile(data))


@fuzzed
@given(text=texts(HOSTFILES))
def test_hostfiles(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(text)
    only_own_errors(lambda: slots_of(path))
    only_own_errors(lambda: cluster_from(path))
    only_own_errors(lambda: parse_hostfile(text.decode(errors="replace"), "hosts").gpus)


@fuzzed
@given(text=texts(as_json([*PLANS[:3], *CLUSTERS[:1], *SHAPES, *PROFILES])))
def test_files(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text)
    for load in (Plan.load, Cluster.load, ModelShape.load, Profile.load, cluster_from):
        only_own_errors(lambda load=load: load(path))  # type: ignore[misc]


def test_the_examples_are_valid() -> None:
    """So that changes reach what lies behind the first check."""
    for plan in (*PLANS, *MINISTAGES):
        read_plan(plan)
    for cluster in CLUSTERS:
        read_cluster(cluster)
    read_profile(PROFILES[0])
    for text in HOSTFILES:
        assert parse_hostfile(text, "hosts").gpus
