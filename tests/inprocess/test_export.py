"""`zorse export`: any checkpoint becomes a folder that transformers reads, one layer at a time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers as hf

from zorse_ds.cli import main
from zorse_ds.core.checkpoint.manifest import VALUE
from zorse_ds.integrations.huggingface.export import export, find_checkpoint
from zorse_ds.integrations.huggingface.saving import write_config
from zorse_ds.ranges import Range
from zorse_ds.runtime.checkpoint.capture import Capture, Entry
from zorse_ds.runtime.checkpoint.exchange import Alone
from zorse_ds.runtime.checkpoint.saving import SaveRequest, save

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": hf.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "tied llama": hf.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gpt2": hf.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "experts": hf.MixtralConfig(**SMALL, num_local_experts=4),
}


def checkpoint_of(model: hf.PreTrainedModel, source: Path, root: Path, pieces: int = 3) -> None:
    """A checkpoint with every parameter in some ranges, as several ranks would write it."""
    entries, shapes = [], {}
    for name, parameter in model.named_parameters():
        flat = parameter.detach().view(-1)
        shapes[name] = tuple(parameter.shape)
        cuts = [flat.numel() * i // pieces for i in range(pieces + 1)]
        for start, stop in pairwise(cuts):
            entries.append(Entry(name, VALUE, Range(start, stop), flat[start:stop]))
    captured = Capture(tuple(entries), shapes, {name: {} for name in shapes})
    request = SaveRequest(
        root,
        tag="t",
        plan={},
        state=None,
        versions={},
        write_model_files=lambda folder: write_config(source, folder, dtype=torch.float32),
    )
    save(request, captured, Alone())


def make(name: str, root: Path) -> hf.PreTrainedModel:
    """A model, its folder and its checkpoint."""
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name])
    model.save_pretrained(root / "source")
    (root / "source" / "tokenizer_config.json").write_text('{"model_max_length": 5}')
    checkpoint_of(model, root / "source", root / "ckpt")
    shutil.rmtree(root / "source")
    return model


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the program says, on stderr and with exit code 2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["zorse", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_what_was_exported(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    done = export(find_checkpoint(tmp_path / "ckpt"), tmp_path / "out")
    found, info = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for key, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"model_max_length": 5}'
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert done.num_files == 5 and done.num_bytes == sum(p.nbytes for p in model.parameters())
    ids = torch.arange(6)[None]
    assert torch.equal(found(ids).logits, model.eval()(ids).logits)


def test_the_command(tmp_path: Path) -> None:
    model = make("tied llama", tmp_path)
    code = "from zorse_ds.cli import main; main()"
    command = [sys.executable, "-c", code, "export", tmp_path / "ckpt", tmp_path / "out"]
    command += ["--dtype", "bfloat16", "--json"]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    facts = json.loads(told.stdout)
    assert facts["checkpoint"] == str(tmp_path / "ckpt" / "t") and facts["dtype"] == "bfloat16"
    found = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == torch.bfloat16
    for key, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[key], value.bfloat16()), key


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("gpt2", tmp_path)
    ckpt, out = tmp_path / "ckpt", tmp_path / "out"
    told = [
        refused(capsys, "export", tmp_path / "nothing", out),
        refused(capsys, "export", ckpt, out, "--tag", "other"),
        refused(capsys, "export", ckpt, out, "--dtype", "float23"),
        refused(capsys, "export", ckpt, ckpt / "t" / "manifest.json"),
    ]
    path = ckpt / "t" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    told.append(refused(capsys, "export", ckpt, out))
    shutil.rmtree(ckpt / "t" / "model")
    told.append(refused(capsys, "export", ckpt, out))
    sentences = [
        "has neither manifest.json nor a file 'latest'",
        "other does not exist; expected one of t",
        "--dtype is 'float23'; expected 'float32', 'bfloat16' or 'float16'; did you mean 'float32'",
        "manifest.json is a file; expected a folder to write",
        "rank-00000.safetensors is damaged (the checksum of transformer",
        "model/config.json is damaged (No such file or directory",
    ]
    for result, expected in zip(told, sentences, strict=True):
        assert expected in result and result.count("\n") == 1, result
    assert not out.exists() or not list(out.iterdir())


PEAK = """
import resource, sys, torch
from pathlib import Path
from zorse_ds.integrations.huggingface.export import export, find_checkpoint
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
export(find_checkpoint(sys.argv[1]), sys.argv[2])
before = peak()
export(find_checkpoint(sys.argv[3]), sys.argv[4])
print(peak() - before)
"""


def test_memory_is_that_of_a_layer(tmp_path: Path) -> None:
    """A small model first, so that what is loaded once does not count."""
    make("llama", tmp_path)
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 20}
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SMALL | wide, tie_word_embeddings=False)
    model = hf.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "big source")
    checkpoint_of(model, tmp_path / "big source", tmp_path / "big", pieces=2)
    arguments = [tmp_path / "ckpt", tmp_path / "out", tmp_path / "big", tmp_path / "big out"]
    command = [sys.executable, "-c", PEAK, *map(str, arguments)]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    growth = int(told.stdout.splitlines()[-1])
    block = sum(p.nbytes for p in model.model.layers[0].parameters())
    total = sum(p.nbytes for p in model.parameters())
    assert growth < 4 * block < total / 4, (growth, block, total)
