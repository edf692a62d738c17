"""What save_checkpoint and load_checkpoint refuse, do in the background, and take from others."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import zorse_ds
from tests.ranks.checkpoint_jobs import (
    PLANS,
    Numbered,
    job_layers,
    make_engine,
    next_part,
    train,
    world_size,
)
from tests.ranks.engine_cases import weights_of
from tests.ranks.engine_models import WIDTH, Block, vectors
from tests.ranks.harness import run_ranks
from zorse_ds import Plan, ZorsePipelineModule
from zorse_ds.errors import CheckpointError
from zorse_ds.runtime.checkpoint import files

NAME = "3 ranks"


def sentence(action: Callable[[], Any]) -> str:
    """What an action is refused with."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "nothing"


def refusals(rank: int, root: Path) -> dict[str, Any]:
    """What each rank is told."""
    engine = make_engine(NAME)
    told: dict[str, Any] = {"none": engine.load_checkpoint(str(root / "nothing"))}
    train(engine, 4)  # the schedule begins at 0
    save = engine.save_checkpoint
    told["client"] = sentence(lambda: save(root, client_state={"f": print}))
    told["tag"] = sentence(lambda: save(root, tag="a/b"))
    told["unlike"] = sentence(lambda: save(root, tag=f"tag{rank}"))
    save(root, tag="good")
    told["expected"] = float(engine.eval_batch(iter([vectors(5)])))
    told["unknown"] = sentence(lambda: engine.load_checkpoint(root, tag="god"))
    engine.destroy()
    other = make_engine(NAME, dataset=Numbered(23))
    told["data"] = sentence(lambda: other.load_checkpoint(root))
    told["module only"] = other.load_checkpoint(root, load_module_only=True)[0]
    told["begins anew"] = (other.global_steps, other.training_dataloader.position.num_consumed)
    other.destroy()
    model = ZorsePipelineModule(job_layers(), Plan.from_dict(PLANS["3 other ranks"]), nn.MSELoss())
    evaluates, *_ = zorse_ds.initialize(model=model, config={"steps_per_print": None})
    fresh = float(evaluates.eval_batch(iter([vectors(5)])))
    evaluates.load_checkpoint(root)
    told["evaluated"] = float(evaluates.eval_batch(iter([vectors(5)])))
    assert fresh != told["evaluated"]
    evaluates.destroy()
    sgd = make_engine(NAME, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    told["optimizer"] = sentence(lambda: sgd.load_checkpoint(root))
    told["weights"] = sgd.load_checkpoint(root, load_optimizer_states=False)[0]
    sgd.destroy()
    seeded = make_engine(NAME, zorse={"data": {"seed": 7}})
    told["seed"] = sentence(lambda: seeded.load_checkpoint(root))
    seeded.destroy()
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("checkpoints")
    return root, run_ranks(3, refusals, root, timeout_s=90)


def test_every_rank_is_told_the_same(told: tuple[Path, list[dict[str, Any]]]) -> None:
    root, ranks = told
    assert ranks[0] == ranks[1] == ranks[2]
    first = ranks[0]
    assert first["none"] == (None, None)
    assert first["client"] == (
        "client_state.f is a builtin_function_or_method, which a checkpoint cannot hold; expected "
        "numbers, texts, lists, tuples, dicts or tensors"
    )
    assert first["tag"].startswith("the tag is 'a/b'; expected the name of a folder")
    assert first["unlike"] == (
        f"the ranks save tag0 in {root} and tag1 in {root} and tag2 in {root}; expected the same "
        "folder and tag on every rank"
    )
    assert first["unknown"] == (f"the checkpoint {root}/god does not exist; expected one of good")
    assert first["data"].startswith("the training data is 23 samples, checksum")
    assert first["data"].endswith("or load_module_only=True to begin anew")
    assert first["module only"] == str(root / "good")
    assert first["begins anew"] == (0, 0)
    assert first["optimizer"] == (
        "the checkpoint was saved with the optimizer Adam, but this run has SGD; expected the "
        "same, or load_optimizer_states=False"
    )
    assert first["weights"] == str(root / "good")
    assert first["evaluated"] == pytest.approx(first["expected"], abs=1e-6)
    assert first["seed"].startswith("the data.seed is 7, but 1234 in the checkpoint")


def in_background(rank: int, root: Path) -> dict[str, Any]:
    """Saves after every step, while the next runs; then one that fails."""
    settings = {"checkpoint": {"async": True, "keep_last": 2}}
    engine = make_engine(NAME, zorse=settings)
    losses, last = [], None
    for _ in range(4):
        losses += train(engine, 1).losses
        engine.save_checkpoint(root)
    engine._checkpoints.wait()
    found: dict[str, Any] = {"kept": sorted(os.listdir(root)) if rank == 0 else None}
    write_all = files.write_all

    def full(file: Any, data: memoryview) -> None:
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, data)

    files.write_all = full
    engine.save_checkpoint(root, tag="full")
    for _ in range(50):
        last = sentence(lambda: losses.extend(train(engine, 1).losses))
        if last != "nothing":
            break
    files.write_all = write_all
    found["raised"] = (engine.global_steps, last)
    found["next"] = train(engine, 1).losses
    found["losses"] = losses
    engine.save_checkpoint(root, tag="last")
    engine.destroy()
    return found


def test_saving_in_the_background(tmp_path: Path) -> None:
    ranks = run_ranks(3, in_background, tmp_path, timeout_s=90)
    assert ranks[0]["kept"] == ["global_step3", "global_step4", "latest"]
    for found in ranks:
        # At the same step on every rank, and training can go on.
        assert found["raised"] == ranks[0]["raised"]
        assert "failed on rank 1 (No space left on device)" in found["raised"][1]
        assert found["next"] == ranks[0]["next"]
    assert (tmp_path / "latest").read_text() == "last"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    resumed = run_ranks(1, next_part, "1 rank", tmp_path, 2, None, timeout_s=60)
    assert len(resumed[0].losses) == 2


def halves(rank: int, root: Path) -> tuple[list[float], list[float], list[float], float, float]:
    """fp16 with a dynamic loss scale: uninterrupted, and resumed."""
    # DeepSpeed asks for fast fp16; torch computes it on any CPU, and this process ends soon.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}}
    engine = make_engine("1 rank", **fp16)
    train(engine, 3)
    saved_scale = engine.optimizer.cur_scale
    engine.save_checkpoint(root)
    whole = train(engine, 5)
    engine.destroy()
    trail = next_part(rank, "1 rank", root, 5, fp16)
    return whole.losses, trail.losses, trail.rates, saved_scale, trail.scale - whole.scale


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    [(whole, resumed, _, scale, difference)] = run_ranks(1, halves, tmp_path, timeout_s=60)
    assert resumed == whole and scale != 2.0**20 and difference == 0


def stock_layers(bias: bool = False) -> list[Any]:
    """A list with a tied layer, as stock DeepSpeed takes it (it ties no biases)."""
    tied = TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH, bias=bias)
    return [tied, *(LayerSpec(Block) for _ in range(4)), tied]


def save_stock(rank: int, root: Path, bias: bool) -> dict[str, torch.Tensor]:
    """Stock DeepSpeed, two stages, one step."""
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(99 + rank)
    model = PipelineModule(stock_layers(bias), num_stages=2, loss_fn=nn.MSELoss())
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "steps_per_print": None,
        },
    )
    data = vectors(8)
    pairs = [
        (torch.stack([x, z]), torch.stack([y, w]))
        for (x, y), (z, w) in zip(data[::2], data[1::2], strict=True)
    ]
    engine.train_batch(iter(pairs))
    engine.save_checkpoint(str(root))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def load_stock(rank: int, root: Path) -> dict[str, Any]:
    """Under a plan of three ranks, in float32 and in bf16."""
    found: dict[str, Any] = {}
    for dtype in ("float32", "bf16"):
        model = ZorsePipelineModule(stock_layers(), Plan.from_dict(PLANS[NAME]), nn.MSELoss())
        config: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        if dtype == "bf16":
            config["bf16"] = {"enabled": True}
        engine, *_ = zorse_ds.initialize(model=model, config=config | {"steps_per_print": None})
        found["path"], found["client"] = engine.load_checkpoint(str(root))
        found[dtype] = weights_of(engine)
        engine.destroy()
    biased = ZorsePipelineModule(stock_layers(True), Plan.from_dict(PLANS[NAME]), nn.MSELoss())
    engine, *_ = zorse_ds.initialize(model=biased, config={"optimizer": config["optimizer"]})
    found["biased"] = sentence(lambda: engine.load_checkpoint(str(root / "biased")))
    engine.destroy()
    (root / "global_step1" / "layer_02-model_states.pt").write_bytes(b"damaged")
    model = ZorsePipelineModule(stock_layers(), Plan.from_dict(PLANS[NAME]), nn.MSELoss())
    engine, *_ = zorse_ds.initialize(model=model, config={"optimizer": config["optimizer"]})
    found["damaged"] = sentence(lambda: engine.load_checkpoint(str(root)))
    engine.destroy()
    return found


def test_weights_of_stock_deepspeed_are_taken(tmp_path: Path) -> None:
    stock = run_ranks(2, save_stock, tmp_path, False, timeout_s=60)
    run_ranks(2, save_stock, tmp_path / "biased", True, timeout_s=60)
    ranks = run_ranks(3, load_stock, tmp_path, timeout_s=60)
    weights = {name: value for own in stock for name, value in own.items()}
    held: dict[str, torch.Tensor] = {}
    for found in ranks:
        assert (found["path"], found["client"]) == (str(tmp_path / "global_step1"), {})
        held |= found["float32"]
        for name, value in found["bf16"].items():
            assert torch.equal(value, found["float32"][name].bfloat16()), name
        assert "has another bias in layer 5 than in layer 0" in found["biased"]
        assert "layer_02-model_states.pt cannot be read" in found["damaged"]
    for name, value in held.items():
        local = name.replace("tied.ends.", "tied_modules.ends.")
        assert torch.equal(value, weights[local]), name
    assert len(held) == 1 + 4 * 3
    assert world_size(NAME) == 3
