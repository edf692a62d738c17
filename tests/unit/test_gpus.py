"""The catalogue of GPU types: its figures, and what answers a name it does not know."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from zorse_ds.cli import app
from zorse_ds.core.gpus import GIB, gpu_type_named, gpu_types, type_of_device, type_suggestion
from zorse_ds.errors import ClusterError

WITHOUT_BF16 = {
    "V100-SXM2-16GB", "V100-SXM2-32GB", "V100-PCIE-16GB", "T4", "P100-PCIE-16GB", "P40",
    "RTX2080TI",
}  # fmt: skip


def test_the_catalogue_is_large_and_sound() -> None:
    types = gpu_types()
    assert len(types) >= 32
    for name, kind in types.items():
        assert kind.name == name
        assert 0 < kind.usable_bytes < kind.memory_bytes
        assert kind.tensor_flops > 0
        assert kind.nvlink_bytes_per_s >= 0 < kind.pcie_bytes_per_s
    assert {name for name, kind in types.items() if not kind.has_bf16} == WITHOUT_BF16


def test_figures_are_in_the_units_of_the_program() -> None:
    a100 = gpu_type_named("A100-SXM-40GB")
    assert (a100.tensor_flops, a100.fp32_flops) == (312e12, 19.5e12)
    assert a100.memory_bytes == 40 * GIB
    assert a100.memory_bytes_per_s == pytest.approx(1.555e12)
    # The catalogue's 600 GB/s count both directions.
    assert (a100.nvlink_bytes_per_s, a100.pcie_bytes_per_s) == (300e9, 24e9)
    assert gpu_type_named("H800-SXM").fp32_flops is None
    assert gpu_type_named("ASCEND-910B").memory_bytes_per_s is None


@pytest.mark.parametrize(
    ("found", "suggested"),
    [
        ("a100", ["A100-SXM-40GB", "A100-SXM-80GB", "A100-PCIE-40GB", "A100-PCIE-80GB"]),
        ("A100-40GB", ["A100-SXM-40GB", "A100-PCIE-40GB"]),
        ("t4", ["T4"]),
        ("rtx 4090", ["RTX4090"]),
        ("RTX409O", ["RTX4090"]),
        ("V100-SXM-16GB", ["V100-SXM2-16GB"]),
        ("mi300", ["MI300X"]),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(found: str, suggested: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        gpu_type_named(found)
    message = str(caught.value)
    assert "\n" not in message
    assert repr(found) in message
    assert [name for name in suggested if repr(name) not in message] == []


def test_a_name_like_no_other_is_answered_with_where_to_look() -> None:
    assert type_suggestion("quuux", gpu_types()) == "; `zorse gpus` lists them"
    assert type_suggestion("", gpu_types()) == "; `zorse gpus` lists them"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("Tesla T4", "T4"),
        ("NVIDIA Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("GeForce RTX 2080 Ti", "RTX2080TI"),
        ("NVIDIA RTX A6000", "A6000"),
    ],
)
def test_a_driver_s_name_finds_its_type(device: str, name: str) -> None:
    kind = type_of_device(device)
    assert kind is not None
    assert kind.name == name


@pytest.mark.parametrize(
    "device", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H200 NVL", "NVIDIA GeForce RTX 3090 Ti"]
)
def test_a_driver_s_name_that_says_more_is_another_type(device: str) -> None:
    assert type_of_device(device) is None


def test_the_command_lists_all_types_and_examples() -> None:
    text = CliRunner().invoke(app, ["gpus"]).output
    rows = {line.split()[0] for line in text.splitlines() if line.split()}
    assert set(gpu_types()) <= rows
    assert {"zorse_a:", "desk:"} <= rows
    facts = json.loads(CliRunner().invoke(app, ["gpus", "--json"]).output)
    assert facts["gpu_types"]["T4"]["tensor_flops"] == 65e12
    assert "zorse_c" in facts["clusters"]


def test_every_entry_is_found_by_its_own_device_name() -> None:
    for name, kind in gpu_types().items():
        found = type_of_device(kind.device_name)
        assert found is not None
        assert found.name == name
