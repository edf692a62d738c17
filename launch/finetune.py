"""Fine-tune a causal language model in a pipeline of unequal GPUs. Copy it and change it.

    deepspeed launch/finetune.py --deepspeed_config launch/ds_config.json \
        --model FOLDER --train train.jsonl --heldout heldout.jsonl --output NEW_FOLDER

The DeepSpeed JSON names the plan: {"zorse": {"plan": "launch/plans/demo.json"}}.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import datasets
import deepspeed
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import zorse_ds
from zorse_ds.errors import ModelError
from zorse_ds.integrations.data import prepare_text

Samples = list[dict[str, Any]]

OTHERS_WAIT_S = 5
"""How long other ranks leave an error to rank 0."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line; `deepspeed` adds --local_rank to it."""
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model by a plan.")
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--train", required=True, help="text: JSONL, JSON, parquet, txt, a glob")
    parser.add_argument("--heldout", required=True, help="text that is not trained on")
    parser.add_argument("--output", required=True, help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=20, help="optimizer updates")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens in a sample")
    parser.add_argument("--heldout-samples", type=int, default=48, help="how many to measure on")
    parser.add_argument("--text-column", default="text", help="column that holds the text")
    parser.add_argument("--cache", default="~/.cache/zorse_ds", help="folder of tokenised text")
    parser.add_argument("--check-export", action="store_true", help="load the result and compare")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return deepspeed.add_config_arguments(parser).parse_args()


def load_tokenizer(folder: str) -> Any:
    """Return the tokenizer beside a model; ModelError when there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as problem:  # transformers fails in many ways when a file is missing
        raise ModelError(
            f"{folder} has no tokenizer that transformers can read "
            f"({str(problem).strip().splitlines()[0]}); expected one beside the model"
        ) from problem
    if not len(tokenizer):
        raise ModelError(f"{folder} has no tokenizer; expected one beside the model")
    return tokenizer


def prepare(args: argparse.Namespace, tokenizer: Any, source: str) -> datasets.Dataset:
    """Tokenise and pack `source` on one rank of each node. Collective: every rank calls this."""
    return prepare_text(
        source,
        tokenizer,
        args.seq_len,
        text_column=args.text_column,
        cache_dir=args.cache,
        builds=int(os.environ["LOCAL_RANK"]) == 0,
        barrier=dist.barrier,
    )


def heldout_batches(dataset: datasets.Dataset, batch_size: int) -> list[Samples]:
    """Return the samples in order, `batch_size` at a time; the last batch may be smaller."""
    rows = dataset.to_list()
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


def num_targets(batch: Samples) -> int:
    """Count the tokens that are predicted: all but each sample's first, if not masked by -100."""
    return sum(label != -100 for sample in batch for label in sample["labels"][1:])


def heldout_loss(engine: zorse_ds.ZorseEngine, dataset: datasets.Dataset, batch_size: int) -> float:
    """Return the mean loss over all target tokens. Collective: every rank calls this."""
    batches = heldout_batches(dataset, batch_size)
    total = sum(map(num_targets, batches))
    loss = 0.0
    for batch in tqdm(batches, desc="held-out loss", disable=dist.get_rank() != 0):
        loss += engine.eval_batch(iter([batch])).item() * num_targets(batch) / total
    return loss


def train(engine: zorse_ds.ZorseEngine, steps: int) -> float:
    """Make `steps` updates and return the seconds they took. Collective: every rank calls this."""
    start = time.perf_counter()
    bar = tqdm(range(steps), desc="training", unit="step", disable=dist.get_rank() != 0)
    for _ in bar:
        loss = engine.train_batch()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return time.perf_counter() - start


def show_speed(plan: zorse_ds.Plan, seq_len: int, steps: int, elapsed_s: float) -> None:
    """Print what each rank held and did."""
    table = Table("rank", "group", "layers", "samples a step", "tokens/s")
    rows = [("all", "", "", plan.global_batch_size)]
    for group in plan.groups:
        layers = " ".join(str(stage.layers) for stage in plan.stages if stage.group == group.name)
        rows += [(str(gpu.rank), group.name, layers, gpu.num_samples) for gpu in group.gpus]
    for *names, samples in rows:
        table.add_row(*names, str(samples), f"{samples * seq_len * steps / elapsed_s:.0f}")
    Console().print(table)


def check_export(folder: str, batch: Samples, expected_loss: float) -> None:
    """Load the saved model as anybody would; exit unless it is whole and gives the same loss."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    problems = {name: keys for name, keys in info.items() if keys}
    if problems:
        raise SystemExit(f"{folder} does not load cleanly: {problems}")
    loss = 0.0
    for sample in batch:
        ids, labels = (torch.tensor([sample[key]]) for key in ("input_ids", "labels"))
        with torch.no_grad():
            mean = model(input_ids=ids, labels=labels).loss.item()
        loss += mean * num_targets([sample]) / num_targets(batch)
    if abs(loss - expected_loss) > 1e-3 * expected_loss:
        raise SystemExit(f"{folder} gives loss {loss:.4f}; the engine gave {expected_loss:.4f}")
    print(f"{folder} loads with transformers; loss {loss:.4f}, in the engine {expected_loss:.4f}")


def run(args: argparse.Namespace) -> None:
    """Load, measure, train, measure, save. Collective: every rank calls this."""
    model = zorse_ds.from_pretrained(args.model, config=args.deepspeed_config)
    plan = model.plan
    tokenizer = load_tokenizer(args.model)
    dataset, heldout = (prepare(args, tokenizer, text) for text in (args.train, args.heldout))
    heldout = heldout.select(range(min(args.heldout_samples, len(heldout))))
    engine, _, _, _ = zorse_ds.initialize(args=args, model=model, training_data=dataset)

    before = heldout_loss(engine, heldout, plan.global_batch_size)
    elapsed_s = train(engine, args.steps)
    after = heldout_loss(engine, heldout, plan.global_batch_size)
    engine.save_pretrained(args.output)
    first = heldout_batches(heldout, plan.global_batch_size)[0]
    first_loss = engine.eval_batch(iter([first])).item()
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(args.output)
        show_speed(plan, args.seq_len, args.steps, elapsed_s)
        print(f"{args.steps} steps in {elapsed_s:.0f} s; held-out loss {before:.4f} -> {after:.4f}")
        if args.check_export:
            check_export(args.output, first, first_loss)
    dist.destroy_process_group()


def main() -> None:
    args = parse_arguments()
    try:
        run(args)
    except zorse_ds.ZorseError as error:
        # Most errors are the same on all ranks. Rank 0 tells them; the launcher then ends the job.
        if int(os.environ.get("RANK", "0")) != 0:
            time.sleep(OTHERS_WAIT_S)
        print(error, file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
