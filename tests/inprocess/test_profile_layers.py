"""Measuring layers: known durations come back, bytes are the plain model's, all kinds run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

from tests.inprocess.hf_models import CONFIGS
from zorse_ds.cli.program import app
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Dtype
from zorse_ds.core.profile import Profile
from zorse_ds.cost.layer_bytes import bytes_of, counted_bytes
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.errors import ModelError, ProfileError
from zorse_ds.integrations.huggingface.timed import TimedModel
from zorse_ds.profiler.layers import Points, joined, measure_layers, num_points
from zorse_ds.profiler.timing import Budget, median_seconds

CPU = torch.device("cpu")
QUICK = Budget(seconds=0.0)
SHAPE = ModelShape.llama("m", 2, 32, 64, 4, vocab=64)


class Sleeper:
    """Two layers that take as long as they say, but for the first time."""

    num_layers = 2

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[str] = []

    def forward(self) -> None:
        time.sleep(0.2 if len(self.calls) < 4 else 0.004 * self.size)
        self.calls.append("forward")

    def backward(self) -> None:
        time.sleep(0.008 * self.size)
        self.calls.append("backward")

    def measured_bytes(self) -> tuple[int, int, int]:
        return 200 * self.size, 10 * self.size, 30 * self.size


class Sleepers:
    """A source with room for micro-batches of up to `most` samples."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.runs: list[Sleeper] = []

    def run(self, kind: str, dtype: Dtype, seq_len: int, size: int) -> Sleeper:
        if size > self.most:
            raise torch.OutOfMemoryError("no room")
        self.runs.append(Sleeper(size))
        return self.runs[-1]


def measured(source: Sleepers) -> tuple[Profile, list[str]]:
    told: list[str] = []
    points = Points(("float32",), (16,), (1, 2, 4))
    found = measure_layers(SHAPE, "X", source, CPU, points, Budget(0.0, 5, 5), told.append)
    assert len(told) == num_points(SHAPE, points)
    return found, told


def test_known_durations_come_back_without_the_warm_up() -> None:
    found, _ = measured(Sleepers(4))
    assert [entry.kind for entry in found.times] == list(SHAPE.kinds)
    for entry in found.times:
        assert entry.micro_batches == (1, 2, 4)
        for size, forward_s, backward_s in zip(
            entry.micro_batches, entry.forward_s, entry.backward_s, strict=True
        ):
            # Of one of the two layers; a busy machine only makes sleep longer.
            assert 0.002 * size <= forward_s < 0.002 * size + 0.05
            assert 0.004 * size <= backward_s < 0.004 * size + 0.05
    for entry in found.bytes:
        figures = (entry.saved_bytes, entry.boundary_bytes, entry.workspace_bytes)
        assert figures == (100, 10, 30)


def test_sizes_that_do_not_fit_are_left_out() -> None:
    found, told = measured(Sleepers(2))
    assert all(entry.micro_batches == (1, 2) for entry in found.times)
    assert "head: larger micro-batches do not fit" not in told
    with pytest.raises(ProfileError, match="micro-batch of 1 × 16 tokens does not fit on X"):
        measured(Sleepers(0))


def test_forward_and_backward_alternate() -> None:
    source = Sleepers(4)
    measured(source)
    for run in source.runs:
        assert run.calls == ["forward", "backward"] * (len(run.calls) // 2)


def test_repeats_end_with_the_budget() -> None:
    calls: list[int] = []
    median_seconds([lambda: calls.append(time.sleep(0.01) or 1)], CPU, Budget(0.05, 3, 1000))  # type: ignore[func-returns-value]
    assert 3 + 2 <= len(calls) <= 6 + 2


def saved_by(module: torch.nn.Module, *inputs: Any, **named: Any) -> int:
    """Bytes that autograd keeps of one call: storages, parameters and buffers aside."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(*inputs, **named)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del output
    return total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kv_heads", "ffn"), [(8, 352), (2, 700)])
def test_counted_bytes_of_a_block_are_those_that_autograd_saves(
    dtype: Dtype, kv_heads: int, ffn: int
) -> None:
    """The formula against a plain block of transformers."""
    config = hf.LlamaConfig(
        hidden_size=128,
        intermediate_size=ffn,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        num_hidden_layers=1,
        vocab_size=64,
    )
    config._attn_implementation = "sdpa"
    block = hf.models.llama.modeling_llama.LlamaDecoderLayer(config, 0).to(getattr(torch, dtype))
    hidden = torch.randn(3, 64, 128, dtype=getattr(torch, dtype), requires_grad=True)
    angles = torch.ones(1, 64, 16, dtype=hidden.dtype)
    saved = saved_by(block, hidden, position_embeddings=(angles, angles.clone()))
    shape = ModelShape.llama("m", 1, 128, ffn, 8, kv_heads=kv_heads).kinds["block"]
    shared = 2 * angles.nbytes
    assert counted_bytes("block", shape, dtype, 64, 3).saved == saved - shared


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration without weights."""
    path = tmp_path_factory.mktemp("model")
    hf.LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=5,
        vocab_size=600,
        max_position_embeddings=256,
    ).save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["embedding", "block", "head"])
def test_measured_bytes_of_real_layers_are_the_counted_ones(
    folder: Path, kind: str, dtype: Dtype
) -> None:
    model = TimedModel(folder, CPU)
    run = model.run(kind, dtype, 256, 3)
    run.forward()
    run.backward()
    saved, boundary, workspace = run.measured_bytes()
    counted = counted_bytes(kind, model.shape.kinds[kind], dtype, 256, 3)
    assert saved / run.num_layers == pytest.approx(counted.saved, rel=0.01)
    assert boundary == counted.boundary
    if kind != "embedding":
        assert workspace == pytest.approx(counted.workspace, rel=0.02)


def test_gradients_are_summed_as_in_training(folder: Path) -> None:
    run = TimedModel(folder, CPU).run("block", "bfloat16", 32, 2)
    flat = run._layers.flats[0]
    assert flat.grad is not None
    assert flat.grad.dtype == torch.float32
    run.forward()
    run.backward()
    once = flat.grad.clone()
    assert once.abs().sum() > 0
    run.forward()
    run.backward()
    torch.testing.assert_close(flat.grad, 2 * once)


def test_the_command_measures_all_kinds(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    sizes = ["--seq-len", "32,64", "--micro-batch", "2,1", "--seconds", "0.01"]
    command = ["profile", "--model", str(folder), *sizes, "--json", "-o", str(path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = Profile.load(path)
    assert Profile.from_dict(json.loads(result.stdout)) == found
    points = {(e.kind, e.seq_len, e.micro_batches, e.dtype) for e in found.times}
    assert points == {
        (kind, length, (1, 2), "float32")
        for kind in ("embedding", "block", "head")
        for length in (32, 64)
    }
    assert {entry.gpu_type for entry in (*found.times, *found.optimizer)} == {"CPU"}
    assert {"torch", "transformers"} <= set(found.versions)
    timer, lookup = timer_of(found), bytes_of(found)
    for kind, shape in found.model.kinds.items():
        assert timer("CPU", kind, shape, "float32", 32, 2).source == "measured"
        assert lookup(kind, shape, "float32", 64, 2).saved > 0
    # Bytes do not depend on how busy the machine is: twice the length, twice the bytes.
    short, long = (e.saved_bytes for e in found.bytes if e.kind == "block")
    assert long == pytest.approx(2 * short, rel=0.02)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "falcon_alibi", "bloom", "qwen2"])
def test_other_families_run(name: str, tmp_path: Path) -> None:
    CONFIGS[name]().save_pretrained(tmp_path)
    model = TimedModel(tmp_path, CPU)
    for kind in model.shape.kinds:
        run = model.run(kind, "float32", 16, 2)
        run.forward()
        run.backward()
        assert run.measured_bytes()[0] > 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--seq-len", "512"], "the length is 512; expected at most 256"),
        (["--device", "gpu"], "--device is 'gpu'; expected cpu"),
        (["--device", "cuda:99"], "--device is 'cuda:99'; expected cpu"),
    ],
)
def test_what_cannot_be_measured_is_said(folder: Path, options: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["profile", "--model", str(folder), *options])
    assert isinstance(result.exception, ModelError | ProfileError)
    assert str(result.exception).startswith(problem)


def test_a_folder_without_a_config_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["profile", "--model", str(tmp_path)])
    assert isinstance(result.exception, ModelError)
    assert "config.json" in str(result.exception)
    assert "\n" not in str(result.exception)


def test_profiles_of_several_types_are_joined() -> None:
    a, _ = measured(Sleepers(1))
    b = a.model_copy(
        update={"times": tuple(e.model_copy(update={"gpu_type": "Y"}) for e in a.times)}
    )
    both = joined([a, b])
    assert [entry.gpu_type for entry in both.times] == ["X"] * 3 + ["Y"] * 3
    assert both.bytes == a.bytes
