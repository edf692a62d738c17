"""What every rank of `benchmarks.chat_finetune` runs: a recipe's run, memory and logits kept."""

import csv
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.resident import growth_of
from zorse_ds.integrations.deepspeed import ZorseEngine, initialize
from zorse_ds.integrations.deepspeed.module import init_distributed
from zorse_ds.integrations.huggingface.pretrained import from_pretrained
from zorse_ds.integrations.recipe.run_folder import RunFolder
from zorse_ds.integrations.recipe.samples import load_samples, load_tokenizer
from zorse_ds.integrations.recipe.schema import Recipe
from zorse_ds.integrations.recipe.script import Training, decay_groups, schedule_of


def keep_logits(engine: ZorseEngine, samples: list[dict[str, Any]], path: Path) -> None:
    """The run's own logits of some samples, by the rank that has the last stage. Collective."""
    _, outputs = engine.eval_batch(iter([samples]), return_logits=True)
    if outputs is None:
        return
    rows = [row for output in outputs for row in getattr(output, "logits", output)]
    ids = [sample["input_ids"] for sample in samples]
    kept = [row[: len(own)] for row, own in zip(rows, ids, strict=True)]
    torch.save({"input_ids": ids, "logits": kept}, path)


def losses_of(folder: RunFolder) -> list[float]:
    with open(folder.curves / "csv" / "Train_Samples_train_loss.csv", newline="") as file:
        return [float(loss) for step, loss in csv.reader(file) if step != "step"]


def main() -> None:
    folder = RunFolder(sys.argv[1])
    recipe = Recipe.load(folder.recipe)
    if recipe.adapters is not None:
        import peft  # noqa: F401  (its code is not a part of loading)
    init_distributed()
    builds = int(os.environ["LOCAL_RANK"]) == 0
    samples = load_samples(
        recipe, load_tokenizer(recipe.model), 6, builds=builds, barrier=dist.barrier
    )
    model, loading = growth_of(
        lambda: from_pretrained(recipe.model, config=str(folder.config), seed=recipe.seed)
    )
    weights = [tensor.nbytes for tensor in model.parameters()]
    engine, _, _, _ = initialize(
        model=model,
        config=str(folder.config),
        model_parameters=decay_groups(model.stage_models.values(), recipe.weight_decay),
        training_data=samples.train,
        lr_scheduler=schedule_of(recipe, recipe.steps or 0),
    )
    training = Training(recipe, folder, engine, samples, recipe.steps or 0)
    start = time.perf_counter()
    training.run()
    seconds = time.perf_counter() - start
    assert samples.validation is not None, "there are held-out samples"
    first = samples.validation.select(range(engine.plan.global_batch_size)).to_list()
    keep_logits(engine, first, folder.root / "logits.pt")
    _, exporting = growth_of(training.finish)
    own = {
        "stage_bytes": sum(weights),
        "largest_bytes": max(weights),
        "loading_bytes": loading,
        "exporting_bytes": exporting,
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    if dist.get_rank() == 0:
        facts = {
            "memory": ranks,
            "validation": [found._asdict() for found in training.measured],
            "losses": losses_of(folder),
            "step_s": seconds / (recipe.steps or 1),
        }
        (folder.root / "measured.json").write_text(json.dumps(facts))
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
