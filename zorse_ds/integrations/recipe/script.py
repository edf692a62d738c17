"""What every rank of `zorse train` runs: load, go on from the last checkpoint, train, export.

DeepSpeed's launcher starts it as a module with the run's folder, where `zorse train` has put
recipe, plan and DeepSpeed JSON. `launch/finetune.py` is the same without a recipe, to be copied.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from zorse_ds.errors import ConfigError, ZorseError
from zorse_ds.files import write_text
from zorse_ds.integrations.deepspeed import ZorseEngine, initialize
from zorse_ds.integrations.deepspeed.agreement import together
from zorse_ds.integrations.deepspeed.module import init_distributed
from zorse_ds.integrations.huggingface.pretrained import from_pretrained
from zorse_ds.integrations.recipe.run_folder import RunFolder
from zorse_ds.integrations.recipe.samples import Samples, load_samples, load_tokenizer
from zorse_ds.integrations.recipe.schema import Recipe
from zorse_ds.integrations.recipe.shared_stream import SharedStream
from zorse_ds.integrations.recipe.validation import Measured, measure

NOT_DECAYING = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Patterns of parameters' names, as in `Trainer.get_decay_parameter_names`."""
USER_ERROR = 2
OTHERS_WAIT_S = 5
"""How long other ranks leave an error to rank 0."""


def run(folder: RunFolder) -> None:
    """The whole run. Collective: every rank calls this."""
    init_distributed()
    recipe = recipe_in(folder)
    # A frozen base needs no masters, so it is read as it computes.
    dtype = torch.float32 if recipe.adapters is None else getattr(torch, recipe.dtype)
    config = str(folder.config)
    model = from_pretrained(recipe.model, config=config, dtype=dtype, seed=recipe.seed)
    batch = model.plan.global_batch_size
    samples = samples_of(recipe, batch)
    num_steps = samples.num_steps(recipe, batch)
    engine, _, _, _ = initialize(
        model=model,
        config=config,
        model_parameters=decay_groups(model.stage_models.values(), recipe.weight_decay),
        training_data=samples.train,
        lr_scheduler=schedule_of(recipe, num_steps),
    )
    stream = SharedStream(samples.stream, engine.parts.world) if recipe.data.streaming else None
    training = Training(recipe, folder, engine, samples, num_steps, stream)
    if folder.steps_saved():
        training.resume()
    training.run()
    training.finish()
    engine.destroy()


def recipe_in(folder: RunFolder) -> Recipe:
    """What `zorse train` wrote. Collective; raises on all ranks where one does not see it."""
    with together("reading the recipe"):
        if not folder.recipe.is_file():
            raise ConfigError(
                f"{folder.recipe} is not on {socket.gethostname()}; expected an output folder that "
                "all nodes share"
            )
        return Recipe.load(folder.recipe)


def samples_of(recipe: Recipe, global_batch: int) -> Samples:
    """The samples, tokenised by one rank of each node. Collective; raises on all ranks alike."""
    streams = dist.get_rank() == 0
    with together("preparing the data"):
        tokenizer = load_tokenizer(recipe.model)
        if int(os.environ["LOCAL_RANK"]) == 0:
            load_samples(recipe, tokenizer, global_batch, streams=streams)
    with together("reading the data"):
        return load_samples(recipe, tokenizer, global_batch, builds=False, streams=streams)


def schedule_of(recipe: Recipe, num_steps: int) -> Callable[[Any], Any]:
    """The schedule of transformers' `Trainer`, for an optimizer."""

    def make(optimizer: torch.optim.Optimizer) -> Any:
        return get_scheduler(
            recipe.lr_scheduler_type,
            optimizer,
            num_warmup_steps=recipe.warmup_steps,
            num_training_steps=num_steps,
        )

    return make


def decay_groups(models: Iterable[torch.nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters as transformers' `Trainer` groups them: norms and biases do not decay."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay} for decay in (weight_decay, 0.0)
    ]
    for model in models:
        decaying = set(get_parameter_names(model, [torch.nn.LayerNorm], NOT_DECAYING))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                groups[name not in decaying]["params"].append(parameter)
    return groups


def follow_schedule(engine: ZorseEngine) -> None:
    """Set the rates that the schedule gives now: a run that goes on may have become longer."""
    schedule = engine.lr_scheduler
    rates = zip(schedule.lr_lambdas, schedule.base_lrs, strict=True)
    for group, (factor, base) in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = base * factor(schedule.last_epoch)


@dataclass
class Training:
    """Steps with what comes between them. Every method is collective."""

    recipe: Recipe
    folder: RunFolder
    engine: ZorseEngine
    samples: Samples
    num_steps: int
    stream: SharedStream | None = None
    measured: list[Measured] = field(default_factory=list)

    def resume(self) -> None:
        """Go on from the latest checkpoint."""
        _, loaded = self.engine.load_checkpoint(str(self.folder.checkpoints))
        follow_schedule(self.engine)
        if self.stream is not None:
            self.stream.resume((loaded or {}).get("stream"), self.engine.global_steps)

    def run(self) -> None:
        """Train from the step that the engine is at to the last one."""
        engine = self.engine
        bar = tqdm(
            total=self.num_steps,
            initial=engine.global_steps,
            desc="training",
            unit="step",
            disable=dist.get_rank() != 0,
        )
        if engine.global_steps == 0:
            self.validate()
        while engine.global_steps < self.num_steps:
            loss = engine.train_batch(self.stream)
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}")
            if is_due(engine.global_steps, self.recipe.eval_steps, self.num_steps):
                self.validate()
            if is_due(engine.global_steps, self.recipe.save_steps, self.num_steps):
                self.save()
        bar.close()

    def save(self) -> None:
        """A checkpoint, with the stream's place."""
        state = {} if self.stream is None else {"stream": self.stream.state_dict()}
        self.engine.save_checkpoint(str(self.folder.checkpoints), client_state=state)

    def validate(self) -> None:
        """Measure on the validation data, if there is any, and say what came out."""
        if self.samples.validation is None:
            return
        found = measure(self.engine, self.samples.validation)
        self.measured.append(found)
        if dist.get_rank() == 0:
            tqdm.write(f"step {found.step}: {found}", file=sys.stderr)

    def finish(self) -> None:
        """Export the model, or its adapters, and write down that the run is complete."""
        start = time.perf_counter()
        merges = self.recipe.merge_adapters
        self.engine.save_pretrained(str(self.folder.model), merge_adapters=merges)
        if dist.get_rank() != 0:
            return
        facts = {
            "steps": self.engine.global_steps,
            "model": str(self.folder.model),
            "export_s": time.perf_counter() - start,
            "validation": [found._asdict() for found in self.measured],
        }
        write_text(self.folder.finished, json.dumps(facts, indent=2) + "\n")
        tqdm.write(f"{facts['steps']} steps; {self.folder.model} written", file=sys.stderr)


def is_due(step: int, every: int | None, last: int) -> bool:
    """Whether something is done after `step`: each `every` steps, and at the end."""
    return step == last or (every is not None and step % every == 0)


def main() -> None:
    try:
        run(RunFolder(sys.argv[1]))
        # Left to the end of the process, gloo's threads may abort it.
        dist.destroy_process_group()
    except ZorseError as error:
        # Most errors are the same on all ranks. Rank 0 tells them; the launcher then ends the job.
        if int(os.environ.get("RANK", "0")) != 0:
            # No more a request to save: the launcher ends those that wait.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(OTHERS_WAIT_S)
        sys.stderr.write(f"{error}\n")
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
