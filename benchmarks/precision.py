"""Do bf16 and fp16 learn like float32?

    python -m benchmarks.precision --model build/smollm2 --text build/docstrings/train.jsonl

A pretrained model is fine-tuned on the same samples by a ragged ministage plan, in float32, bf16
and fp16 (float32 masters, gradients summed in float32), and with a group in bf16 beside one in
float32. Printed is how far each loss curve strays from that of float32; `bash launch/demo.sh` makes
the model and the text.
"""

import argparse
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

import zorse_ds
from tests.ranks.harness import run_ranks
from zorse_ds.core.plan import Plan
from zorse_ds.integrations.data import load_source, tokenise_and_pack

CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
}
KINDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "float32": ({}, None),
    "bf16": ({"bf16": {"enabled": True}}, None),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 12}}, None),
    "bf16 beside float32": ({}, "bfloat16"),
}


def plan_of(num_layers: int, dtype: str | None) -> Plan:
    """Two unequal groups with two stages each; `dtype` is the first group's own."""
    cuts = [0, num_layers // 3, num_layers // 2, num_layers - 6, num_layers]
    first = {"name": "first", "zero_level": 3, **({"dtype": dtype} if dtype else {})}
    return Plan.from_dict(
        {
            "global_batch_size": 4,
            "schedule": "ministage",
            "groups": [
                first | {"gpus": [{"rank": 0, "micro_batches": [2, 2]}]},
                {"name": "second", "gpus": [{"rank": 1, "micro_batches": [1, 3]}]},
            ],
            "stages": [
                {"group": ("first", "second")[i % 2], "layers": [start, stop]}
                for i, (start, stop) in enumerate(pairwise(cuts))
            ],
        }
    )


def curve(rank: int, kind: str, model: str, samples: list[Any], steps: int) -> list[float]:
    """The losses of one precision."""
    torch.set_num_threads(1)
    config, dtype = KINDS[kind]
    # DeepSpeed wants fast float16 kernels of a CPU; here any that are right will do.
    get_accelerator().is_fp16_supported = lambda: True
    num_layers = json.loads(Path(model, "config.json").read_text())["num_hidden_layers"] + 2
    module = zorse_ds.from_pretrained(model, plan=plan_of(num_layers, dtype))
    engine = zorse_ds.initialize(model=module, config=CONFIG | config, training_data=samples)[0]
    losses = []
    for step in range(steps):
        losses.append(float(engine.train_batch()))
        if rank == 0 and step % 10 == 9:
            print(f"{kind}: step {step + 1} of {steps}, loss {losses[-1]:.4f}", flush=True)
    return losses


def smooth(losses: list[float], width: int = 5) -> list[float]:
    """Means over `width` steps."""
    return [sum(losses[i : i + width]) / width for i in range(0, len(losses) - width + 1, width)]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The picture: all curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for kind, losses in curves.items():
        axis.plot(losses, label=kind, linewidth=1)
    axis.set_xlabel("step")
    axis.set_ylabel("loss")
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="build/smollm2")
    parser.add_argument("--text", default="build/docstrings/train.jsonl")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    text = load_source(args.text).select(range(1000))
    packed = tokenise_and_pack(text, AutoTokenizer.from_pretrained(args.model), args.length)
    samples = packed.select(range(4 * args.steps)).to_list()
    args.output.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[float]] = {}
    for kind in args.kinds:
        results = run_ranks(2, curve, kind, args.model, samples, args.steps, timeout_s=20_000)
        curves[kind] = results[0]
        # At once, for a CPU may take an hour for float16.
        (args.output / "precision.json").write_text(json.dumps(curves, indent=2))
    draw(curves, args.output / "precision.png")
    table = Table("", "first loss", "last 5 steps", "farthest from float32, any 5 steps")
    base = smooth(curves["float32"])
    for kind, losses in curves.items():
        own = smooth(losses)
        far = max(abs(a - b) / b for a, b in zip(own, base, strict=True))
        table.add_row(kind, f"{losses[0]:.4f}", f"{own[-1]:.4f}", f"{far:.2%}")
    Console().print(table)


if __name__ == "__main__":
    main()
