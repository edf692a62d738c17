"""A script as a user writes it, run by the tests through the launcher or with a patched DeepSpeed.

Each rank trains a few steps and writes its losses and weights to `--output`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

import zorse_ds

WIDTH = 4
STEPS = 3


def dataset() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, WIDTH, generator=generator)) for _ in range(20)]


def train(args: argparse.Namespace, initialize: Any) -> dict[str, Any]:
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    model = zorse_ds.ZorsePipelineModule(layers, config=args.deepspeed_config, loss_fn=nn.MSELoss())
    engine, *_ = initialize(args=args, model=model, training_data=dataset())
    losses = [engine.train_batch().item() for _ in range(STEPS)]
    weights = {
        name: parameter.detach().clone()
        for stage in model.stage_models.values()
        for name, parameter in stage.global_parameters()
    }
    engine.destroy()
    return {"losses": losses, "weights": weights, "engine": type(engine).__name__}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--with_patch", action="store_true")
    args = deepspeed.add_config_arguments(parser).parse_args()
    results = {"ours": train(args, zorse_ds.initialize), "deepspeed": deepspeed.__file__}
    if args.with_patch:
        results["theirs"] = train(args, deepspeed.initialize)
    torch.save(results, args.output / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
