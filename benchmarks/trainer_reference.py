"""The same run as a recipe's, by transformers' own `Trainer` in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import torch
import transformers as hf
from peft import PeftModel

from zorse_ds.integrations.recipe.schema import Recipe


class Losses(hf.TrainerCallback):
    """Keeps what `Trainer` logs of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def trainer_losses(
    recipe: Recipe,
    dataset: datasets.Dataset,
    tokenizer: Any,
    *,
    global_batch: int,
    micro_batch: int,
    folder: Path,
    adapters: Path | None = None,
) -> list[float]:
    """The loss of each step, all in float32 and in the data set's order.

    With `adapters`, a folder of `peft`'s, these alone are trained, from the values there.
    `Trainer`'s own collator pads, and its own rule divides by the targets of a whole batch.
    """
    model = hf.AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float32)
    if adapters is not None:
        model = PeftModel.from_pretrained(model, str(adapters), is_trainable=True)
    arguments = hf.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=global_batch // micro_batch,
        max_steps=recipe.steps or -1,
        num_train_epochs=recipe.epochs or 1,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.lr_scheduler_type,
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.gradient_clipping,
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    kept = Losses()
    trainer = hf.Trainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        data_collator=hf.DataCollatorForSeq2Seq(tokenizer),
        callbacks=[kept],
    )
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    return kept.losses
