"""Chat fine-tuning of a real model on three unequal ranks, in full and with LoRA.

    python -m benchmarks.chat_finetune --model build/smollm2 --text build/docstrings

Conversations are made of docstrings (what is asked is the signature, the answer the first
paragraph). Printed are the loss on held-out conversations, how far the exported model's logits, as
transformers or `peft` load it, are from those of the run, how far the loss curve is from that of
`Trainer` in one process, and the peak of resident memory while loading and exporting. `bash
launch/demo.sh` makes the model and the text. About ten minutes on two cores.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.trainer_reference import trainer_losses
from zorse_ds.core.plan import Plan
from zorse_ds.integrations.recipe.config import config_of
from zorse_ds.integrations.recipe.launching import command_of, environment_of
from zorse_ds.integrations.recipe.run_folder import RunFolder
from zorse_ds.integrations.recipe.samples import load_samples, load_tokenizer
from zorse_ds.integrations.recipe.schema import Recipe

MIB = 2**20
LONGEST_ANSWER = 100
PLAN = {
    "global_batch_size": 6,
    "groups": [
        {
            "name": "fast",
            "zero_level": 2,
            "gpus": [
                {"rank": 0, "micro_batches": [2, 2], "shard_weight": 2.0},
                {"rank": 1, "micro_batches": [1, 1]},
            ],
        },
        {"name": "slow", "zero_level": 1, "gpus": [{"rank": 2, "micro_batches": [2, 2, 2]}]},
    ],
    "stages": [{"group": "fast", "layers": [0, 23]}, {"group": "slow", "layers": [23, 32]}],
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"learning_rate": 1e-4},
    "LoRA": {
        "learning_rate": 1e-3,
        "adapters": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    },
}


def write_chats(source: Path, target: Path, count: int) -> None:
    """The first `count` docstrings that are short, as conversations of two turns."""
    lines = []
    for line in source.read_text().splitlines():
        asked, answer, *_ = json.loads(line)["text"].split("\n\n")
        if len(asked) + len(answer) > LONGEST_ANSWER or len(lines) == count:
            continue
        turns = [("user", f"What does {asked} do?"), ("assistant", answer.strip())]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(f"{line}\n" for line in lines))


def recipe_of(kind: str, args: argparse.Namespace) -> Recipe:
    """What is run."""
    return Recipe.from_dict(
        {
            "model": str(args.model),
            "output": str(args.output / kind),
            "data": {
                "train": str(args.output / "train.jsonl"),
                "validation": str(args.output / "heldout.jsonl"),
                "shuffle": False,
                "cache": str(args.output / "cache"),
            },
            "plan": "written below",
            "seq_len": 96,
            "steps": args.steps,
            "lr_scheduler_type": "linear",
            "warmup_steps": 3,
            "dtype": "float32",
            **KINDS[kind],
        }
    )


def launch(recipe: Recipe) -> dict[str, Any]:
    """Run `benchmarks.chat_finetune_ranks` by the launcher; what it measured."""
    folder, plan = RunFolder(recipe.output), Plan.from_dict(PLAN)
    shutil.rmtree(folder.root, ignore_errors=True)
    recipe.save(folder.recipe)
    plan.save(folder.plan)
    folder.config.write_text(json.dumps(config_of(recipe, plan, folder)))
    command = command_of(recipe, plan, folder)
    command[command.index("--module") + 1] = "benchmarks.chat_finetune_ranks"
    subprocess.run(command, env=environment_of(plan, os.environ), check=True)
    found: dict[str, Any] = json.loads((folder.root / "measured.json").read_text())
    return found


def exported_logits_error(recipe: Recipe) -> tuple[float, float]:
    """The largest difference to the run's own logits, and the largest of those."""
    folder = RunFolder(recipe.output)
    saved = torch.load(folder.root / "logits.pt")
    model = AutoModelForCausalLM.from_pretrained(
        recipe.model if recipe.adapters else folder.model, dtype=torch.float32
    )
    if recipe.adapters:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder.model))
    worst = largest = 0.0
    for ids, own in zip(saved["input_ids"], saved["logits"], strict=True):
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([ids])).logits[0]
        worst = max(worst, float((logits - own).abs().max()))
        largest = max(largest, float(own.abs().max()))
    return worst, largest


def curves_of_trainer(recipe: Recipe) -> list[list[float]]:
    """The losses of `Trainer` on the same samples, in micro-batches of two and of three.

    They differ by nothing but the order of sums: what rounding makes of a curve.
    """
    tokenizer = load_tokenizer(recipe.model)
    batch = PLAN["global_batch_size"]
    samples = load_samples(recipe, tokenizer, batch)
    folder = Path(recipe.output) / "trainer"
    return [
        trainer_losses(
            recipe, samples.train, tokenizer, global_batch=batch, micro_batch=size, folder=folder
        )
        for size in (2, 3)
    ]


def distance(one: list[float], other: list[float]) -> str:
    """The largest difference of two curves."""
    return f"{max(abs(a - b) for a, b in zip(one, other, strict=True)):.1e}"


def memory_table(found: dict[str, dict[str, Any]]) -> Table:
    """By how much resident memory grew at most, beside the bound for it."""
    heads = ("rank", "own stage", "+ largest tensor", "loading", "exporting")
    table = Table("", *heads, title="Growth of resident memory, at most, in MiB")
    for kind, facts in found.items():
        for rank, memory in enumerate(facts["memory"]):
            bound = memory["stage_bytes"] + memory["largest_bytes"]
            sizes = (memory["stage_bytes"], bound)
            sizes += tuple(memory[f"{work}_bytes"] for work in ("loading", "exporting"))
            table.add_row(kind, str(rank), *(f"{size / MIB:.0f}" for size in sizes))
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--text", type=Path, default=Path("build/docstrings"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks/chat"))
    args = parser.parse_args()
    batch = PLAN["global_batch_size"]
    write_chats(args.text / "train.jsonl", args.output / "train.jsonl", batch * args.steps)
    write_chats(args.text / "heldout.jsonl", args.output / "heldout.jsonl", 4 * batch)
    console, found = Console(width=110), {}
    heads = ("held-out loss", "exported logits", "beside Trainer", "Trainer beside itself")
    table = Table("", *heads, "s a step")
    for kind in args.kinds:
        recipe = recipe_of(kind, args)
        facts = found[kind] = launch(recipe)
        before, after = (facts["validation"][i]["loss"] for i in (0, -1))
        worst, largest = exported_logits_error(recipe)
        cells = [f"{before:.4f} -> {after:.4f}", f"{worst:.1e} of {largest:.0f}", "", ""]
        if recipe.adapters is None:
            first, second = facts["trainer"] = curves_of_trainer(recipe)
            cells[2:] = [distance(facts["losses"], first), distance(first, second)]
        table.add_row(kind, *cells, f"{facts['step_s']:.1f}")
    console.print(table)
    console.print(memory_table(found))
    (args.output / "chat_finetune.json").write_text(json.dumps(found, indent=2))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
