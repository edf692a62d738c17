"""Weights in torch's `.bin` files: the same stages as of safetensors, and no code from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.inprocess.hf_models import CONFIGS, save_checkpoint
from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface import CausalLMStages
from zorse_ds.integrations.huggingface.stored_weights import StoredTensor, stored_weights

LAYERS = ((0, 2), (2, 4), (4, 5))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A folder of safetensors, and one beside it with the configuration alone."""
    plain, bins = tmp_path / "plain", tmp_path / "bins"
    for folder in (plain, bins):
        folder.mkdir()
    save_checkpoint(CONFIGS["llama"](), plain)
    (bins / "config.json").write_text((plain / "config.json").read_text())
    return plain, bins


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def write_bins(folder: Path, tensors: dict[str, torch.Tensor], num_files: int) -> None:
    """One file, or several with an index."""
    if num_files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    names = sorted(tensors)
    weight_map = {}
    for i in range(num_files):
        file = f"pytorch_model-{i + 1:05d}-of-{num_files:05d}.bin"
        torch.save({name: tensors[name] for name in names[i::num_files]}, folder / file)
        weight_map |= dict.fromkeys(names[i::num_files], file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_are_those_of_safetensors(
    folders: tuple[Path, Path], num_files: int, dtype: torch.dtype
) -> None:
    plain, bins = folders
    write_bins(bins, weights(plain), num_files)
    ours, theirs = (CausalLMStages.from_folder(folder, dtype=dtype) for folder in (bins, plain))
    for layers in LAYERS:
        found = ours.build(*layers).state_dict()
        expected = theirs.build(*layers).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def of_junk(path: Path) -> None:
    path.write_bytes(b"junk" * 100)


def of_a_trainer(path: Path) -> None:
    torch.save({"model": torch.load(path), "step": 7}, path)


def of_a_list(path: Path) -> None:
    torch.save([torch.zeros(3)], path)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut_short, r"is damaged \(.+\); expected a file of weights"),
        (of_junk, r"is damaged \(KeyError: \d+\)"),
        (of_a_trainer, r"holds a dict; expected tensors by name"),
        (of_a_list, r"holds a list; expected tensors by name"),
    ],
)
def test_a_bin_file_that_is_damaged_is_named(
    folders: tuple[Path, Path], damage: Callable[[Path], None], told: str
) -> None:
    plain, bins = folders
    write_bins(bins, weights(plain), 2)
    damage(bins / "pytorch_model-00002-of-00002.bin")
    stages = CausalLMStages.from_folder(bins)
    with pytest.raises(
        ModelError, match=r"bins/pytorch_model-00002-of-00002\.bin " + told
    ) as told_:
        stages.build(0, 2)
    assert "\n" not in str(told_.value)


def without_its_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def with_a_long_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def without_braces(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"{", b" ", 1))


@pytest.mark.parametrize("damage", [without_its_end, with_a_long_header, without_braces, of_junk])
def test_a_safetensors_file_that_is_damaged_is_named(
    folders: tuple[Path, Path], damage: Callable[[Path], None]
) -> None:
    path = sorted(folders[0].glob("*.safetensors"))[-1]
    damage(path)
    with pytest.raises(
        ModelError, match=f"{path} is damaged .*; expected a file of weights"
    ) as told:
        CausalLMStages.from_folder(folders[0]).build(0, 2)
    assert "\n" not in str(told.value)


def test_a_file_that_ends_while_it_is_read_is_named(folders: tuple[Path, Path]) -> None:
    """Its size fits when it is opened."""
    found = stored_weights(folders[0])
    last = max((t for t in found.values() if isinstance(t, StoredTensor)), key=lambda t: t.offset)
    without_its_end(last.path)
    with pytest.raises(ModelError, match=f"{last.path} is damaged"):
        last[...]


def test_tensors_of_a_bin_file_may_share_memory_and_lie_crosswise(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.bfloat16).view(6, 10)
    tensors = {"whole": base, "rows": base[2:4], "cross": base.t(), "every": base[::2, 1::3]}
    tensors |= {"none": base[:0], "one": base[3, 4], "ids": torch.arange(5)}
    (tmp_path / "config.json").write_text("{}")
    for older in (False, True):
        path = tmp_path / "pytorch_model.bin"
        torch.save(tensors, path, _use_new_zipfile_serialization=not older)
        found = stored_weights(tmp_path)
        assert found.keys() == tensors.keys()
        for name, stored in found.items():
            assert isinstance(stored, StoredTensor) is not older
            assert torch.equal(stored[...], tensors[name]), name


def test_a_file_that_the_index_names_must_be_there(folders: tuple[Path, Path]) -> None:
    plain, bins = folders
    write_bins(bins, weights(plain), 2)
    (bins / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ModelError, match=r"00002-of-00002\.bin, which is not there"):
        CausalLMStages.from_folder(bins)


class Trap:
    """Would leave a file behind if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_nothing_in_a_file_is_run(folders: tuple[Path, Path]) -> None:
    _, bins = folders
    trapped = bins / "trapped"
    torch.save({"model.embed_tokens.weight": Trap(trapped)}, bins / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"pytorch_model\.bin .* \(Unsupported global: .*nothing in it was"
    ):
        CausalLMStages.from_folder(bins).build(0, 2)
    assert not trapped.exists()
