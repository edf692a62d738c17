"""Finding a model's auxiliary loss over routers, and making sure that it is the one we know."""

import sys
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from zorse_ds.integrations.huggingface.recorders import RefusalError
from zorse_ds.integrations.huggingface.router_loss import RouterLoss

_OWN_FUNCTION = "load_balancing_loss_func"


def find_router_loss(model: PreTrainedModel) -> RouterLoss | None:
    """The auxiliary loss that the model's configuration switches on, None where it does not.

    Raises RefusalError unless it is the loss above: its own function is tried on some numbers.
    """
    if not getattr(model.config.get_text_config(decoder=True), "output_router_logits", False):
        return None
    recorder = _recorder(model)
    facts: list[Any] = [
        getattr(model, name, None)
        for name in ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    ]
    if recorder is None or recorder.layer_name is not None or None in facts:
        raise RefusalError("output_router_logits adds a loss whose parts are not found")
    num_experts, top_k, coefficient = facts
    loss = RouterLoss(
        int(num_experts), int(top_k), float(coefficient), recorder.target_class, recorder.index
    )
    if not any(isinstance(module, loss.router) for module in model.modules()):
        return None
    _compare(model, loss)
    return loss


def without_router_loss(config: PretrainedConfig) -> None:
    """Switch the model's own computation of the loss off, in place: it wants all blocks' logits."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "output_router_logits", False):
        text.output_router_logits = False


def _recorder(model: PreTrainedModel) -> OutputRecorder | None:
    """How transformers itself finds the routers' logits."""
    found = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            outputs = getattr(type(module), "_can_record_outputs", None) or {}
            spec = outputs.get("router_logits")
            found += [spec] if isinstance(spec, OutputRecorder) else []
    return found[0] if len({(each.target_class, each.index) for each in found}) == 1 else None


def _compare(model: PreTrainedModel, loss: RouterLoss) -> None:
    """RefusalError unless the model's own function gives what `loss` does."""
    function = getattr(sys.modules[type(model).__module__], _OWN_FUNCTION, None)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(3, 2, 6, loss.num_experts, generator=generator)
    for mask in (None, torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])):
        sums = sum(loss.sums(each, 2, mask) for each in blocks)
        assert isinstance(sums, torch.Tensor), "there are blocks"
        ours = float(loss.of(sums))
        try:
            rows = tuple(each.flatten(0, 1) for each in blocks)
            theirs = float(function(rows, loss.num_experts, loss.top_k, mask))  # type: ignore[misc]
        except Exception as problem:  # a function of another form fails in its own way
            raise RefusalError(
                "output_router_logits adds a loss that is computed in a way of its own "
                f"({type(problem).__name__}: {problem})"
            ) from None
        if abs(ours - theirs) > 1e-4 * abs(ours):
            raise RefusalError(
                "output_router_logits adds a loss that is not the usual one of load balancing"
            )
