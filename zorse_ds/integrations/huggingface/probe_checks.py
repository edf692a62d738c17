"""What must hold of a recorded forward for a model to be cut; each check raises RefusalError."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from zorse_ds.integrations.huggingface.recorders import BlockCall, Recording, RefusalError


def check_order(recording: Recording, num_blocks: int) -> None:
    """Every block runs once, in order."""
    order = [call.index for call in recording.blocks]
    if order != list(range(num_blocks)):
        raise RefusalError(f"its forward calls its {num_blocks} blocks in the order {order}")
    wheres = {call.hidden_argument for call in recording.blocks}
    if len(wheres) > 1:
        raise RefusalError("its blocks do not all get the hidden state as the same argument")


def chain_is_broken(recording: Recording, logits: torch.Tensor) -> bool:
    """Whether some block is given something else than exactly what the one before returned."""
    calls = recording.blocks
    linked = all(later.hidden is earlier.output for earlier, later in pairwise(calls))
    return not linked or not calls or logits.shape[:2] != calls[0].hidden.shape[:2]


def check_chain(recording: Recording) -> None:
    """Nothing but the hidden state reaches a block from the embeddings or from other blocks."""
    for call in recording.blocks:
        if not call.hidden.requires_grad:
            raise RefusalError(f"the hidden state of block {call.index} comes from no parameter")
        for path, value in call.others.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise RefusalError(
                    f"block {call.index} gets argument {path}, which depends on parameters or "
                    "hidden states from before it"
                )


def check_logits(recording: Recording, logits: Any) -> None:
    """The logits depend on the last block's result and on nothing from before it."""
    if not isinstance(logits, torch.Tensor) or not logits.requires_grad:
        raise RefusalError("its forward returns no logits that depend on its parameters")
    last = recording.blocks[-1].output
    early = [call.output for call in recording.parts if call.num_blocks_called == 0]
    early += [call.output for call in recording.blocks[:-1]]
    grads = torch.autograd.grad(logits.sum(), [last, *early], allow_unused=True)
    if grads[0] is None:
        raise RefusalError("its logits do not depend on its last block")
    if any(grad is not None for grad in grads[1:]):
        raise RefusalError("its logits depend on embeddings or blocks other than the last block")


def sort_parts(
    recordings: Sequence[Recording], paths: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """Paths of parts that run before the blocks, after them, and those mapping hidden states."""
    num_blocks = len(recordings[0].blocks)
    sides: dict[str, set[int]] = {path: set() for path in paths}
    identity = set()
    for call in (call for recording in recordings for call in recording.parts):
        sides[call.path].add(call.num_blocks_called)
        if call.takes_hidden:
            identity.add(call.path)
    for path, side in sides.items():
        if side not in ({0}, {num_blocks}):
            raise RefusalError(f"{path} {_when(side)}")
    before = tuple(path for path in paths if sides[path] == {0})
    after = tuple(path for path in paths if sides[path] == {num_blocks})
    if not before or not after:
        raise RefusalError("it has no parameters before its first or none behind its last block")
    return before, after, frozenset(identity.intersection(before))


def _when(side: set[int]) -> str:
    """Words for a part that runs neither only before nor only after the blocks."""
    if not side:
        return "has parameters but is never run"
    return f"runs when {' and '.join(map(str, sorted(side)))} of the blocks have run"


def check_alike(whole: Recording, later: Recording) -> None:
    """A later stage gives its blocks the very arguments that the whole model gives them."""
    for ours, theirs in zip(later.blocks, whole.blocks, strict=True):
        _check_call(ours, theirs)


def _check_call(ours: BlockCall, theirs: BlockCall) -> None:
    for path in sorted(set(ours.others) | set(theirs.others)):
        if not _equal(ours.others.get(path), theirs.others.get(path)):
            raise RefusalError(
                f"block {ours.index} gets argument {path}, which a later stage cannot make without "
                "the token ids or embeddings"
            )


def _equal(ours: Any, theirs: Any) -> bool:
    """Same value, and for tensors the same dtype, shape and numbers."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return type(ours) is type(theirs) and bool(ours == theirs)
