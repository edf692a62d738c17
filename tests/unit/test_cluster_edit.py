"""What-if: a cluster without some nodes or with more; and where clusters come from."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.cluster_files import cluster_from, example_clusters
from zorse_ds.errors import ClusterError

NODES: list[dict[str, Any]] = [
    {"name": "a", "gpu_type": "A100-SXM-40GB", "num_gpus": 4, "intra_gb_per_s": 300,
     "nic_gb_per_s": 12.5, "price_per_hour": 10.0, "region": "east"},
    {"gpu_type": "T4", "num_gpus": 2, "intra_gb_per_s": 12, "nic_gb_per_s": 3,
     "price_per_hour": 1.0, "region": "east", "nic_latency_us": 70},
    {"name": "c", "gpu_type": "T4", "num_gpus": 1, "intra_gb_per_s": 12, "nic_gb_per_s": 6,
     "price_per_hour": 0.6, "region": "east", "nic_latency_us": 60},
]  # fmt: skip
LINKS = [
    {"nodes": list(pair), "gb_per_s": 1.0 + i, "latency_us": 10.0 + i}
    for i, pair in enumerate(permutations(range(3), 2))
]
BEFORE = Cluster.from_dict({"nodes": NODES, "links": LINKS})


@pytest.mark.parametrize("names", [[1], ["node1"], ["1"], ["node1", 1]])
def test_a_node_goes_and_its_links_go_with_it(names: list[int | str]) -> None:
    after = BEFORE.without(names)
    assert [node.name for node in after.nodes] == ["a", "c"]
    old = {(0, 1): (0, 2), (1, 0): (2, 0)}
    for pair, was in old.items():
        assert after.between(*pair)[0] == BEFORE.between(*was)[0]
        rates = [lane.bytes_per_s for lane in after.between(*pair)[1]]
        assert rates == [lane.bytes_per_s for lane in BEFORE.between(*was)[1]]


def test_a_name_comes_before_an_index() -> None:
    nodes = [{**node, "name": name} for node, name in zip(NODES, ("2", "1", "0"), strict=True)]
    after = Cluster.from_dict({"nodes": nodes}).without(["2"])
    assert [node.name for node in after.nodes] == ["1", "0"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["node3"], "there is no node 'node3'; expected one of a, node1, c"),
        ([-1], "there is no node -1"),
        (["nod1"], "did you mean 'node1'?"),
        ([0, 1, 2], "no node is left"),
    ],
)
def test_nodes_that_cannot_go_are_told(names: list[int | str], words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        BEFORE.without(names)
    assert words in str(caught.value)


def test_what_is_added_is_like_the_fastest_of_its_type() -> None:
    added = BEFORE.with_added("4xT4").nodes[-1]
    assert (added.name, added.gpu_type, added.num_gpus) == ("added", "T4", 4)
    assert (added.nic_gb_per_s, added.nic_latency_us, added.region) == (6, 60, "east")
    assert added.price_per_hour == pytest.approx(2.4)


def test_a_new_type_gets_usual_links_behind_the_best_nic() -> None:
    more = BEFORE.with_added("2xH100-SXM@8.5").with_added("L4")
    h100, l4 = more.nodes[-2:]
    assert (h100.intra_gb_per_s, h100.nic_gb_per_s, h100.price_per_hour) == (450, 12.5, 8.5)
    assert (l4.num_gpus, l4.intra_gb_per_s, l4.nic_gb_per_s) == (1, 16, 12.5)
    assert [node.name for node in more.nodes[-2:]] == ["added", "added1"]
    assert BEFORE.price_per_hour == pytest.approx(11.6)
    assert more.price_per_hour is None


def test_a_type_of_the_file_can_be_added() -> None:
    types = {"ODD": {"tensor_tflops": 1, "memory_gib": 2}}
    more = Cluster.from_dict({"nodes": NODES, "types": types}).with_added("3xODD")
    assert [gpu.type.name for gpu in more.gpus[-3:]] == ["ODD"] * 3


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("2xA100", "did you mean 'A100-SXM-40GB' or 'A100-SXM-80GB'"),
        ("0xT4", "expected NUMBERxTYPE"),
        ("", "expected NUMBERxTYPE"),
        ("2x", "expected NUMBERxTYPE"),
    ],
)
def test_what_cannot_be_added_is_told(what: str, words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        BEFORE.with_added(what)
    assert words in str(caught.value)


NUM_GPUS = {"desk": 5, "mini_b": 8, "zorse_a": 20, "zorse_b": 64, "zorse_c": 128}


def test_examples_ship_with_the_package() -> None:
    assert set(example_clusters()) == set(NUM_GPUS)
    assert {name: len(cluster_from(name).gpus) for name in NUM_GPUS} == NUM_GPUS
    # Published per sending node: as one shared link, the paper's own 7B run could not be.
    assert cluster_from("zorse_c").inter_region_gb_per_s_is == "per_node"


def test_a_file_comes_before_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BEFORE.save("desk")
    Path("hosts").write_text("w slots=3 gpu_type=T4\n")
    assert cluster_from("desk") == BEFORE
    assert len(cluster_from("hosts").gpus) == 3


@pytest.mark.parametrize("name", ["zorse_d", "none.json"])
def test_what_is_neither_is_one_sentence(name: str) -> None:
    with pytest.raises(ClusterError) as caught:
        cluster_from(name)
    assert f"{name} is no file and no example cluster" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_json_is_not_taken_for_a_hostfile(tmp_path: Path) -> None:
    for name, text in (("c.json", "w slots=3 gpu_type=T4"), ("c", ' {"nodes": [}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ClusterError, match="expected JSON"):
            cluster_from(tmp_path / name)
    with pytest.raises(ClusterError, match="cannot be read"):
        cluster_from(tmp_path)
    (tmp_path / "d.json").write_text(json.dumps({"node": []}))
    with pytest.raises(ClusterError, match=r"d\.json: node is not a known key"):
        cluster_from(tmp_path / "d.json")
