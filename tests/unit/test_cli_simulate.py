"""`zorse simulate`: from files alone to seconds, bytes, a picture and a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.unit.simulated import plan_of
from zorse_ds.cli import app
from zorse_ds.cli.simulate import simulate
from zorse_ds.core.model import ModelShape
from zorse_ds.errors import ClusterError, ConfigError, PlanError, ZorseError

CLUSTER = {
    "types": {"ODD-1": {"fp32_tflops": 5, "memory_gib": 12, "memory_gb_per_s": 300}},
    "nodes": [
        {"gpu_type": "ODD-1", "num_gpus": 1, "intra_gb_per_s": 5, "nic_gb_per_s": 1},
        {"gpu_types": ["T4"], "intra_gb_per_s": 5, "nic_gb_per_s": 1},
    ],
    "links": [{"nodes": [0, 1], "gb_per_s": 0.5, "latency_us": 400}],
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Somebody else's plan, links and profile, for a device type that no catalogue has."""
    model = ModelShape.llama("foreign", 4, 256, 688, 8, vocab=1000)
    times = [
        {
            "gpu_type": kind,
            "kind": layer,
            "dtype": "float16",
            "seq_len": 128,
            "micro_batches": [1, 2],
            "forward_s": [factor * seconds, 2 * factor * seconds],
            "backward_s": [2 * factor * seconds, 4 * factor * seconds],
        }
        for kind, factor in (("ODD-1", 1.0), ("T4", 2.0))
        for layer, seconds in (("embedding", 0.001), ("block", 0.01), ("head", 0.004))
    ]
    plan = plan_of({"a": {0: [2, 2]}, "b": {1: [1, 2, 1]}}, [("a", 4), ("b", 2)])
    data: dict[str, Any] = {
        "plan.json": plan.to_dict(),
        "cluster.json": CLUSTER,
        "shape.json": model.model_dump(mode="json"),
        "profile.json": {"model": model.model_dump(mode="json"), "times": times},
    }
    for name, content in data.items():
        (tmp_path / name).write_text(json.dumps(content))
    return {name.split(".")[0]: str(tmp_path / name) for name in data}


def invoke(files: dict[str, str], *options: str, model: str = "profile") -> Result:
    fixed = ["--cluster", files["cluster"], "--seq-len", "128", "--dtype", "float16"]
    return CliRunner().invoke(
        app, ["simulate", files["plan"], *fixed, f"--{model}", files[model], *options]
    )


def test_a_foreign_profile_and_links_give_seconds(files: dict[str, str]) -> None:
    """Rank 1 is the slower: 2 · (0.01 + 0.004) s forward a sample, twice that backward."""
    result = invoke(files, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    busy_s = [rank["busy_share"] * facts["step_s"] for rank in facts["ranks"]]
    # Beside the passes, gradients are zeroed: microseconds.
    assert busy_s == pytest.approx([4 * 3 * 0.031, 4 * 3 * 2 * 0.014], rel=1e-3)
    assert facts["tokens_per_s"] == pytest.approx(4 * 128 / facts["step_s"])
    assert facts["bubble_share"] == pytest.approx(1 - sum(busy_s) / 2 / facts["step_s"])
    ceiling = 1 / (2 * 0.045 + 0.09) + 1 / (2 * 0.09 + 0.18)
    assert facts["ceiling_samples_per_s"] == pytest.approx(ceiling)
    assert facts["fits"] is True
    assert {each["lane"] for each in facts["lanes"]} >= {"link 0 1", "link 1 0"}
    memory = facts["ranks"][0]["memory"]
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace")
    total = sum(memory[part] for part in parts) + memory["reserve"]
    assert facts["ranks"][0]["peak_bytes"] == total


def test_the_table_names_ranks_types_and_the_limit(files: dict[str, str]) -> None:
    result = invoke(files)
    assert result.exit_code == 0, result.output
    for text in ("s a step", "tokens/s", "Limit: rank 0", "ODD-1", "T4", "GiB at the peak"):
        assert text in result.output
    assert "Busiest links:" in result.output


def test_what_does_not_fit_is_told(files: dict[str, str]) -> None:
    data = json.loads(Path(files["cluster"]).read_text())
    data["nodes"][1]["usable_gib"] = 1.01
    Path(files["cluster"]).write_text(json.dumps(data))
    result = invoke(files)
    assert "Does not fit: memory is short on rank 1" in result.output


def test_pictures_and_traces_hold_every_pass(files: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "step.svg", tmp_path / "trace.json"
    result = invoke(files, "--picture", str(picture), "--trace", str(trace))
    assert result.exit_code == 0, result.output
    assert "rank 1 T4" in picture.read_text() or "<svg" in picture.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    passes = [e for e in events if e["ph"] == "X" and e["name"] in ("ForwardPass", "BackwardPass")]
    assert len(passes) == 2 * (2 + 3)
    begun = [e["id"] for e in events if e["ph"] == "b"]
    assert sorted(begun) == sorted(e["id"] for e in events if e["ph"] == "e")
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0 ODD-1", "rank 1 T4"}


def fails(files: dict[str, str], error: type[ZorseError], match: str, **changed: Any) -> None:
    """The command's function raises what `main` prints as one sentence with exit code 2."""
    options: dict[str, Any] = {
        "cluster": files["cluster"],
        "seq_len": 128,
        "profile": Path(files["profile"]),
        "dtype": "float16",
    }
    with pytest.raises(error, match=match) as raised:
        simulate(Path(changed.pop("plan", files["plan"])), **{**options, **changed})
    assert len(str(raised.value).splitlines()) == 1


def test_mistakes_are_one_sentence(files: dict[str, str], tmp_path: Path) -> None:
    fails(files, ConfigError, "no model is given; expected --model", profile=None)
    both = {"model": tmp_path, "shape": Path(files["shape"])}
    fails(files, ConfigError, "--model and --shape are both given", **both)
    fails(files, ClusterError, "nowhere", cluster="nowhere.json")
    wide = plan_of({"a": {0: [1], 1: [1], 2: [1]}}, [("a", 6)])
    wide.save(tmp_path / "wide.json")
    fails(files, PlanError, "the plan has 3 ranks, but the", plan=tmp_path / "wide.json")
    deep = plan_of({"a": {0: [1]}}, [("a", 9)])
    deep.save(tmp_path / "deep.json")
    fails(files, PlanError, "the model has 6 pipeline layers", plan=tmp_path / "deep.json")
    fails(files, ConfigError, "expected a name that ends in .png", picture=tmp_path / "x.pdf")
