"""`zorse profile --estimate`: one block on a GPU that is not at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from zorse_ds.cli.profile_estimate import parse_layer
from zorse_ds.cli.program import app
from zorse_ds.core.model import llama_block
from zorse_ds.cost.estimate import EstimatedTimes
from zorse_ds.errors import ProfileError, ZorseError

LAYER = "hidden=6656,ffn=17920,heads=52,kv_heads=52"
COMMAND = ["profile", "--estimate", "T4", "--layer", LAYER, "--seq-len", "512"]


def run(arguments: list[str]) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_json_has_one_estimate_a_size() -> None:
    found = json.loads(run([*COMMAND, "--dtype", "float16", "--micro-batch", "1,2,4", "--json"]))
    assert (found["gpu_type"], found["dtype"], found["seq_len"]) == ("T4", "float16", 512)
    assert {"hidden": 6656, "ffn": 17920, "heads": 52, "kv_heads": 52}.items() <= found[
        "layer"
    ].items()
    assert [each["micro_batch"] for each in found["estimates"]] == [1, 2, 4]
    for each in found["estimates"]:
        times = EstimatedTimes()(
            "T4", "block", llama_block(6656, 17920, 52), "float16", 512, each["micro_batch"]
        )
        assert each["forward_s"] == pytest.approx(times.forward_s)
        assert each["backward_s"] == pytest.approx(times.backward_s)
        assert each["source"] == "estimated"
    assert 0 < found["error"]["median_share"] < found["error"]["p90_share"] < 1
    assert "T4" in found["error"]["from"]


def test_a_measured_block_says_so_and_a_missing_dtype_is_replaced() -> None:
    layer = "hidden=4096,ffn=11008,heads=32"
    options = ["--layer", layer, "--seq-len", "1024", "--dtype", "bfloat16", "--json"]
    found = json.loads(run(["profile", "--estimate", "V100-SXM2-16GB", *options]))
    assert found["dtype"] == "float16"
    # llama_7b,v100x16,1024,float16: 5.5765 n + 0.8881 milliseconds.
    first = found["estimates"][0]
    assert (first["forward_s"], first["source"]) == (
        pytest.approx(6.4646e-3),
        "interpolated",
    )


def test_the_table_states_the_error() -> None:
    text = run([*COMMAND, "--micro-batch", "2"])
    assert "micro-batch" in text
    assert "half of them within" in text


@pytest.mark.parametrize(
    ("text", "num_params", "matrices"),
    [
        ("hidden=4096,ffn=11008,heads=32", 202383360, 3),
        ("hidden=2048,ffn=8192,heads=16", 50358272, 2),
        (" hidden = 4096 , ffn=14336,heads=32,kv_heads=8", 218112000, 3),
        ("hidden=1024,ffn=4096,heads=16,matrices=3", 4 * 1024**2 + 3 * 1024 * 4096 + 2048, 3),
    ],
)
def test_layers_have_the_parameters_of_such_models(
    text: str, num_params: int, matrices: int
) -> None:
    """Of Llama 7B and Llama 3 8B, and the 1.3B GPT, as published."""
    shape = parse_layer(text)
    assert shape.num_ffn_matrices == matrices
    assert shape.num_params == pytest.approx(num_params, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hiden=1,ffn=2,heads=1", "'hiden=1'.*did you mean 'hidden'"),
        ("hidden=4096,ffn=11008", "without heads"),
        ("hidden=4096,ffn=x,heads=32", "'ffn=x'; expected a whole number"),
        ("hidden=4096,ffn=0,heads=32", "'ffn=0'; expected a whole number"),
        ("hidden=4096,ffn=11008,heads=31", "31 heads do not divide"),
        ("hidden=4096,ffn=11008,heads=32,kv_heads=5", "kv_heads=5; expected a divisor"),
        ("hidden=4096,ffn=11008,heads=32,matrices=4", "matrices=4; expected 2"),
        ("", "''; expected|has ''"),
    ],
)
def test_bad_layers_are_one_sentence(text: str, problem: str) -> None:
    with pytest.raises(ProfileError, match=problem) as caught:
        parse_layer(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--estimate", "T44", "--layer", LAYER], "'T44'.*'T4'"),
        (["--estimate", "T4"], "expected --layer"),
        (["--estimate", "T4", "--layer", LAYER, "--seq-len", "1,2"], "one --seq-len"),
        (["--estimate", "T4", "--layer", LAYER, "--seq-len", "long"], "--seq-len has 'long'"),
        (["--estimate", "T4", "--layer", LAYER, "--micro-batch", "1,0"], "--micro-batch has '0'"),
        (["--estimate", "T4", "--layer", LAYER, "--dtype", "bf16"], "--dtype has 'bf16'"),
        (["--layer", LAYER], "--model FOLDER"),
        ([], "--model FOLDER"),
    ],
)
def test_bad_options_are_one_sentence(arguments: list[str], problem: str) -> None:
    with pytest.raises(ZorseError, match=problem) as caught:
        run(["profile", *arguments])
    assert "\n" not in str(caught.value)


def test_it_loads_no_torch_and_exits_with_2_on_bad_input() -> None:
    script = (
        "import sys; from zorse_ds.cli import main; sys.argv[1:] = {!r}\n"
        "try:\n    main()\nfinally:\n"
        "    print('loaded', [m for m in ('torch', 'transformers') if m in sys.modules])"
    )

    def zorse(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script.format(arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ},
        )

    good = zorse([*COMMAND, "--json"])
    assert good.returncode == 0, good.stderr
    assert good.stdout.endswith("loaded []\n")
    bad = zorse(["profile", "--estimate", "A1000", "--layer", LAYER])
    assert bad.returncode == 2
    assert "A100" in bad.stderr
    assert len(bad.stderr.strip().splitlines()) == 1
