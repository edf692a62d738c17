"""A worker that looks at its own memory after each instruction, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zorse_ds.runtime.flat import FlatParameters
from zorse_ds.runtime.optimizer import StageParameters
from zorse_ds.runtime.step import ForwardStep
from zorse_ds.runtime.worker import Worker
from zorse_ds.schedule.instructions import Instruction, ReshardParams, UnshardParams
from zorse_ds.schedule.trace import Trace
from zorse_ds.simulator.timeline import Timeline


@dataclass(frozen=True)
class Sight:
    """What a rank holds after an instruction."""

    instruction: Instruction
    resident: dict[int, int]
    """Stage → bytes of its parameters that are there beside the own shards."""
    held: dict[int, int]
    """Stage → micro-batches between forward and backward."""
    with_grads: frozenset[int]
    """Stages of which gradients are there."""


class WatchedWorker(Worker):
    """Checks that a step leaves nothing behind, and looks at memory after each instruction."""

    sights: list[Sight]

    def _execute(self, trace: Trace, step: ForwardStep) -> Timeline:
        handlers = {kind: self._seen(handle) for kind, handle in step.handlers().items()}
        step.handlers = lambda: handlers  # type: ignore[method-assign]
        timeline = super()._execute(trace, step)
        assert not step.outbox and not step.loaded
        assert not getattr(step, "roots", {})
        assert not any(runner.held for runner in self.runners.values())
        assert not self.resident(), "sharded parameters are whole between steps"
        return timeline

    def _seen(self, handle: Callable[[Any], None]) -> Callable[[Any], None]:
        def handle_and_look(instruction: Instruction) -> None:
            handle(instruction)
            self._check_gathered(instruction)
            held = {stage: len(runner.held) for stage, runner in self.runners.items()}
            grads = frozenset(at for at, own in self.trained.stages.items() if _has_grads(own))
            self.sights.append(Sight(instruction, self.resident(), held, grads))

        return handle_and_look

    def resident(self) -> dict[int, int]:
        """Stage → bytes of its gathered parameters, if any are there."""
        sizes = {
            stage: sum(each.flat.data.untyped_storage().nbytes() for each in own.sharded)
            for stage, own in self.trained.stages.items()
        }
        return {stage: size for stage, size in sizes.items() if size}

    def _check_gathered(self, instruction: Instruction) -> None:
        """All or nothing of a stage is there; parameters that are not there hold nothing."""
        for stage, own in self.trained.stages.items():
            if isinstance(instruction, UnshardParams) and instruction.index == stage:
                assert all(_bytes(each.flat) == _whole_bytes(each.flat) for each in own.sharded)
            if isinstance(instruction, ReshardParams) and instruction.stage == stage:
                assert not any(_bytes(each.flat) for each in own.sharded)
                assert not any(p.numel() for each in own.sharded for p in each.flat.parameters)


def _has_grads(own: StageParameters) -> bool:
    return any(b.flat.grad is not None or b.master.grad is not None for b in own.buckets)


def _bytes(flat: FlatParameters) -> int:
    return flat.data.untyped_storage().nbytes()


def _whole_bytes(flat: FlatParameters) -> int:
    return flat.numel * flat.data.element_size()
