"""The auxiliary loss of mixtures of experts is that of all blocks, wherever they are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from tests.inprocess.hf_models import (
    StageCache,
    gradients,
    make_batch,
    parameters_of,
    run,
    save_checkpoint,
)
from tools.tiny_configs import CONFIGS, ROUTED
from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface import (
    CausalLMLoss,
    CausalLMStages,
    collate_for,
    count_targets,
)
from zorse_ds.ranges import Range

CUTS = ([(0, 5)], [(0, 1), (1, 4), (4, 5)], [(0, 2), (2, 3), (3, 5)])


def labels_of(batch: dict[str, Tensor]) -> Tensor:
    labels = batch["input_ids"].clone()
    labels[batch.get("attention_mask", torch.ones_like(labels)) == 0] = -100
    labels[0, :3] = -100
    return labels


def balance(router_logits: tuple[Tensor, ...], top_k: int, mask: Tensor) -> Tensor:
    """Switch Transformer's equations 4 to 6 over all blocks, token by token, in float64."""
    experts = router_logits[0].shape[-1]
    chosen, total = torch.zeros(2, experts, dtype=torch.float64)
    tokens = 0
    for block in router_logits:
        for logits, seen in zip(block.reshape(-1, experts), mask.flatten(), strict=True):
            if seen:
                probabilities = logits.softmax(-1)
                total = total + probabilities
                tokens += 1
                for expert in probabilities.topk(top_k).indices:
                    chosen[expert] += 1
    return experts * sum(c / tokens * (p / tokens) for c, p in zip(chosen, total, strict=True))


def reference(
    model: Any, batch: dict[str, Tensor], exact: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unsplit model, with its own balance loss or one in float64.

    The cross entropy is made here, since the models' own rounds logits to float32.
    """
    model.zero_grad(set_to_none=True)
    labels = labels_of(batch)
    output = model(**batch, use_cache=False)
    targets = labels[:, 1:].flatten()
    entropy = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets)
    own = output.aux_loss
    if exact:
        mask = batch.get("attention_mask", torch.ones_like(labels))
        own = balance(output.router_logits, model.num_experts_per_tok, mask)
    loss = entropy + model.router_aux_loss_coef * own
    loss.backward()
    return loss.detach(), gradients(model.named_parameters())


def ours(pipeline: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    for stage in pipeline:
        stage.zero_grad(set_to_none=True)
    labels = labels_of(batch)
    loss_sum, count = CausalLMLoss(pipeline[0].structure.router_loss)(run(pipeline, batch), labels)
    assert count == count_targets(labels)
    (loss_sum / count).backward()
    return (loss_sum / count).detach(), gradients(parameters_of(pipeline))


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert worst < tolerance


@pytest.mark.parametrize("name", ROUTED)
def test_every_cut_gives_the_loss_of_all_blocks(name: str, tmp_path: Path) -> None:
    config = ROUTED[name]()
    config.router_aux_loss_coef = 0.5
    model = save_checkpoint(config, tmp_path)
    cache = StageCache(CausalLMStages.from_folder(tmp_path, dtype=torch.float64))
    for kind in ("plain", "padded"):
        batch = make_batch(kind)
        theirs, their_grads = reference(model, batch, exact=False)
        exact, exact_grads = reference(model, batch, exact=True)
        for cut in CUTS:
            loss, grads = ours(cache.pipeline(cut), batch)
            # transformers computes this loss in float32, also in a model in float64.
            assert abs(loss - exact) < 1e-6
            assert_near(grads, exact_grads, 1e-6)
            assert abs(loss - theirs) < 1e-6
            assert_near(grads, their_grads, 1e-12)
    plain = CausalLMLoss()(run(cache.pipeline(CUTS[0]), batch)[0], labels_of(batch))
    assert abs(plain[0] / plain[1] - loss) > 0.1


def test_recomputed_blocks_are_not_counted_twice(tmp_path: Path) -> None:
    save_checkpoint(ROUTED["mixtral"](), tmp_path)
    stages = CausalLMStages.from_folder(tmp_path, dtype=torch.float64)
    batch = make_batch("padded")
    plain = ours(StageCache(stages).pipeline(CUTS[2]), batch)
    pipeline = StageCache(stages, recomputed=Range(0, 99)).pipeline(CUTS[2])
    for _ in range(2):
        again = ours([stage.train() for stage in pipeline], batch)
        assert torch.equal(again[0], plain[0])
        assert_near(again[1], plain[1], 1e-15)


def test_padding_is_never_counted() -> None:
    """Where samples bring no mask, one is made, so that it does not matter who shares a batch."""
    structure = CausalLMStages.from_config(ROUTED["mixtral"]()).structure
    collate = collate_for(structure)
    short, long = {"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11, 12]}
    inputs, _ = collate([short, long])
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    packed = {"input_ids": [5, 6], "position_ids": [0, 0]}
    assert "attention_mask" not in collate([packed])[0]
    plain = collate_for(CausalLMStages.from_config(CONFIGS["mixtral"]()).structure)
    assert "attention_mask" not in plain([short, long])[0]


def test_what_is_saved_keeps_the_setting() -> None:
    stages = CausalLMStages.from_config(ROUTED["mixtral"]())
    assert stages.config.output_router_logits
    assert not stages.build(0, 2).model.config.output_router_logits


def test_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = hf.models.mixtral.modeling_mixtral
    own = module.load_balancing_loss_func
    changes = {
        "not the usual one": lambda *args: 2 * own(*args),
        "a way of its own": lambda logits: own(logits),
    }
    for reason, change in changes.items():
        monkeypatch.setattr(module, "load_balancing_loss_func", change)
        with pytest.raises(
            ModelError, match=f"output_router_logits adds a loss that is .*{reason}"
        ):
            CausalLMStages.from_config(ROUTED["mixtral"]())
