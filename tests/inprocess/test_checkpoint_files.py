"""What is on the disk: each element once, readable by others, and every damage named."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.inprocess.checkpoint_cases import PLANS, STEPS, job, layers, loading, saving
from tests.inprocess.exact_cases import CountedTokenSum, make_plan
from tests.inprocess.local_job import Job, Outcome, run
from zorse_ds.errors import CheckpointError
from zorse_ds.runtime.checkpoint.loading import open_checkpoint

READERS = ("one process", "2-1-2")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """A checkpoint of each plan, and what its run left behind."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: (root / name, run(job(), plan, STEPS[:2], after=saving(root / name)))
        for name, plan in PLANS.items()
    }


@pytest.mark.parametrize("name", PLANS)
def test_every_element_is_written_once(name: str, written: dict[str, tuple[Path, Outcome]]) -> None:
    root, outcome = written[name]
    manifest = open_checkpoint(root / "t").manifest
    covered: dict[tuple[str, str], list[int]] = {}
    for file in manifest.files:
        for piece in file.pieces:
            covered.setdefault((piece.kind, piece.name), []).extend(range(*piece.window))
    values = outcome.values[-1]
    for parameter, value in values.items():
        assert sorted(covered.pop(("value", parameter))) == list(range(value.numel()))
        if not parameter.startswith("3."):
            for kind in ("optimizer.exp_avg", "optimizer.exp_avg_sq"):
                assert sorted(covered.pop((kind, parameter))) == list(range(value.numel()))
    assert not covered
    assert manifest.shapes == {parameter: tuple(v.shape) for parameter, v in values.items()}


@pytest.mark.parametrize("name", PLANS)
def test_ranks_share_what_all_of_them_hold(
    name: str, written: dict[str, tuple[Path, Outcome]]
) -> None:
    """As the shard weights say, also where nothing is sharded."""
    manifest = open_checkpoint(written[name][0] / "t").manifest
    sizes = [file.num_bytes - file.header_bytes for file in manifest.files]
    for group in PLANS[name].groups:
        own = sum(sizes[rank] for rank in group.ranks)
        weights = sum(gpu.shard_weight for gpu in group.gpus)
        for gpu in group.gpus:
            share = own * gpu.shard_weight / weights
            # A bucket is cut in whole elements of three tensors; frozen parameters one by one.
            assert abs(sizes[gpu.rank] - share) < 200


def test_the_library_reads_the_files(written: dict[str, tuple[Path, Outcome]]) -> None:
    root, outcome = written["abaca"]
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for path in sorted((root / "t").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                match = re.fullmatch(r"value/(.+)\[(\d+), \d+\)", key)
                if match:
                    parts.setdefault(match[1], {})[int(match[2])] = file.get_tensor(key)
    assert parts.keys() == outcome.values[-1].keys()
    for name, value in outcome.values[-1].items():
        joined = torch.cat([part for _, part in sorted(parts[name].items())])
        assert torch.equal(joined, value.flatten())


def test_the_files_are_little_larger_than_the_state(tmp_path: Path) -> None:
    wide = [torch.nn.Linear(128, 128) for _ in range(6)]
    own = Job(wide, None, job().make_optimizer)
    plan = make_plan([[[1, 2], [2]], [[1], [4]], [[5]]], 6)
    steps = [type(STEPS[0])([(torch.randn(128), torch.zeros(())) for _ in range(5)])]
    own = Job([*wide[:5], torch.nn.Sequential(wide[5], Mean())], None, own.make_optimizer)
    run(own, plan, steps, after=saving(tmp_path))
    state = 3 * 4 * sum(p.numel() for layer in wide for p in layer.parameters())
    size = sum(path.stat().st_size for path in (tmp_path / "t").rglob("*") if path.is_file())
    assert size < 1.1 * state


class Mean(torch.nn.Module):
    """A loss."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.square().mean()


def load(root: Path, reader: str = "one process") -> None:
    run(job(), PLANS[reader], [], before=loading(root))


@pytest.fixture
def copy(written: dict[str, tuple[Path, Outcome]], tmp_path: Path) -> Path:
    """A checkpoint to be damaged."""
    shutil.copytree(written["abaca"][0], tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_byte_anywhere_is_found_and_its_file_named(seed: int, copy: Path) -> None:
    rng = random.Random(seed)
    files = sorted(path for path in (copy / "t").rglob("*") if path.is_file())
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    first = 2000 if rng.random() < 0.5 else len(data)  # headers and ends alike
    at = rng.randrange(min(first, len(data)))
    data[at] ^= rng.randrange(1, 256)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        load(copy, rng.choice(READERS))
    named = {path.name, "manifest.json"} if path.name == "SHA256SUMS" else {path.name}
    assert any(name in str(caught.value) for name in named)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_cut_or_gone_or_longer_is_named(reader: str, copy: Path) -> None:
    path = copy / "t" / "rank-00001.safetensors"
    data = path.read_bytes()
    for changed in (data[:-4], data[:100], data + b"\0", b""):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is damaged"):
            load(copy, reader)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is damaged \(No such file"):
        load(copy, reader)
    path.write_bytes(data)
    load(copy, reader)


def test_a_checkpoint_of_another_model_is_refused_before_damage(
    written: dict[str, tuple[Path, Outcome]],
) -> None:
    root = written["3-1"][0]
    wider = layers()
    wider[2] = torch.nn.Linear(3, 3)
    other = Job(wider, CountedTokenSum(), job().make_optimizer)
    values = run(other, PLANS["2-1-2"], [STEPS[0]]).losses

    def failing(rank: object, optimizer: object) -> None:
        with pytest.raises(CheckpointError) as caught:
            loading(root)(rank, optimizer)  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"{root}/t lacks 2.weight, 2.bias, which the model has; expected a checkpoint of the "
            f"same model\n{root}/t holds 2.mix.weight, 2.mix.bias, which the model lacks; "
            "expected a checkpoint of the same model"
        )

    assert run(other, PLANS["2-1-2"], [STEPS[0]], before=failing).losses == values


def test_another_shape_is_refused(written: dict[str, tuple[Path, Outcome]]) -> None:
    wider = layers()
    wider[2].mix = torch.nn.Linear(3, 4)
    other = Job(wider, CountedTokenSum(), job().make_optimizer)
    with pytest.raises(CheckpointError, match=r"2.mix.weight has shape \[3, 3\] in .* \[4, 3\]"):
        run(other, PLANS["1-3"], [], before=loading(written["3-1"][0]))


def test_not_strict_takes_what_fits(written: dict[str, tuple[Path, Outcome]]) -> None:
    more = [*layers(), torch.nn.Linear(7, 7)]
    other = Job(more, CountedTokenSum(), job().make_optimizer)
    plan = make_plan([[[4]], [[2, 2]]], 8)
    hook = loading(written["3-1"][0], strict=False, with_optimizer=False)
    values = run(other, plan, [type(STEPS[0])(STEPS[0].samples[:4])], before=hook).values[0]
    saved = written["3-1"][1].values[-1]
    assert (values["1.mix.weight"] - saved["1.mix.weight"]).abs().max() < 0.1
    assert values.keys() - saved.keys() == {"7.weight", "7.bias"}


@pytest.mark.parametrize("name", ["1-3", "abab"])
def test_frozen_parameters_may_be_left_out(name: str, tmp_path: Path) -> None:
    """Those of the run that loads stay as they are; a run that trains them is refused."""
    hook = saving(tmp_path, with_frozen=False, frozen_left_out=True)
    values = run(job(), PLANS[name], STEPS[:2], after=hook).values[-1]
    manifest = open_checkpoint(tmp_path / "t").manifest
    assert {key for key in values if key.startswith("3.")} == values.keys() - manifest.shapes.keys()
    found = run(job(), PLANS["3-1"], STEPS[2:3], before=loading(tmp_path))
    again = run(job(), PLANS[name], STEPS[:3])
    assert abs(found.losses[0] - again.losses[2]) < 1e-6
    thawed = job(group_of=lambda name: int(name.endswith("bias")))
    with pytest.raises(CheckpointError, match=r"t lacks 3\.mix\.weight, 3\.mix\.bias, which"):
        run(thawed, PLANS["3-1"], [], before=loading(tmp_path))
