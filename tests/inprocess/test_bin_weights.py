"""Weights in torch's `.bin` files: the same stages as of safetensors, and no code from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.inprocess.hf_models import CONFIGS, save_checkpoint
from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface import CausalLMStages

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
    with pytest.raises(ModelError, match="cannot be loaded"):
        CausalLMStages.from_folder(bins).build(0, 2)
    assert not trapped.exists()
