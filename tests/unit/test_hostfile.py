"""A DeepSpeed hostfile as a cluster; DeepSpeed's own parser reads the same file (tests/ranks)."""

from __future__ import annotations

from pathlib import Path

import pytest

from zorse_ds.core.hostfile import load_hostfile, parse_hostfile
from zorse_ds.errors import ClusterError

HOSTS = """\
# two generations
big    slots=2 gpu_type=A100-SXM-40GB region=east  # the new one

desk-1 slots=3  gpu_type=RTX4090,RTX3090,RTX3090 region=west nic_gb_per_s=1.2 price_per_hour=0
desk-2 slots=1 gpu_type=T4 region=west intra_gb_per_s=9.5 host_gb_per_s=6 host_memory_gib=64
"""


def test_lines_become_nodes_with_usual_links() -> None:
    cluster = parse_hostfile(HOSTS, "hosts")
    assert [gpu.type.name for gpu in cluster.gpus] == [
        *["A100-SXM-40GB"] * 2, "RTX4090", "RTX3090", "RTX3090", "T4",
    ]  # fmt: skip
    big, desk, small = cluster.nodes
    assert (big.name, big.region, big.price_per_hour) == ("big", "east", None)
    # NVLink of the A100; two thirds of a PCIe 4 copy for cards whose bridge is sold apart.
    assert (big.intra_gb_per_s, big.nic_gb_per_s) == (300, 12.5)
    assert (desk.intra_gb_per_s, desk.nic_gb_per_s, desk.price_per_hour) == (16, 1.2, 0)
    assert (small.intra_gb_per_s, small.nic_gb_per_s) == (9.5, 3.1)
    assert (small.host_gb_per_s, small.host_memory_gib) == (6, 64)
    assert (cluster.inter_region_gb_per_s, cluster.inter_region_gb_per_s_is) == (0.6, "per_node")
    assert "typical" in cluster.link_figures


def test_one_region_needs_no_link_between_regions() -> None:
    assert parse_hostfile("w slots=2 gpu_type=T4", "hosts").inter_region_gb_per_s is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("w slot=2 gpu_type=T4", "'slot=2' is not understood"),
        ("w slot=2 gpu_type=T4", "did you mean 'slots'?"),
        ("w slots=2 gpu_tpye=T4", "did you mean 'gpu_type'?"),
        ("w slots=two gpu_type=T4", "slots is 'two'; expected a whole number from 1 to 4096"),
        ("w slots=0 gpu_type=T4", "slots is '0'"),
        ("w slots=2 gpu_type=T5", "gpu_type is 'T5', which the catalogue does not know"),
        ("w slots=2 gpu_type=a100", "did you mean 'A100-SXM-40GB' or"),
        ("w slots=2", "gpu_type is missing"),
        ("w gpu_type=T4 slots=2", "w is not followed by slots=NUMBER"),
        ("w slots=2 gpu_type=T4,T4,L4", "gpu_type names 3 GPUs; expected one, or 2"),
        ("w slots=2 gpu_type=T4 nic_gb_per_s=fast", "nic_gb_per_s is 'fast'; expected a number"),
        ("w slots=2 gpu_type=T4 nic_gb_per_s=0", "nic_gb_per_s is 0; expected more than 0"),
        ("w slots=2 gpu_type=T4 gpu_type=L4", "gpu_type is given twice"),
        ("w slots=2 gpu_type=", "'gpu_type=' is not understood; expected KEY=VALUE"),
        ("first slots=2 gpu_type=T4", "host 'first' is named twice"),
    ],
)
def test_a_typo_is_one_sentence_with_its_line(line: str, words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_hostfile(f"first slots=1 gpu_type=T4\n# comment\n{line}\n", "hosts")
    message = str(caught.value)
    assert message.startswith("hosts line 3: ")
    assert "\n" not in message
    assert words in message


def test_all_lines_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=x gpu_type=T4\nb slots=1 gpu_type=T4\nc slots=1\n")
    with pytest.raises(ClusterError) as caught:
        load_hostfile(path)
    starts = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert starts == [f"{path} line 1", f"{path} line 3"]


def test_no_host_and_no_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="names no host; expected lines such as"):
        parse_hostfile("# nobody\n\n", "hosts")
    with pytest.raises(ClusterError, match="cannot be read"):
        load_hostfile(tmp_path / "none")
