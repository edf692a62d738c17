"""The trace: every instruction of a step for the whole cluster, in one list."""

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zorse_ds.core.layout import Layout
from zorse_ds.core.plan import Plan
from zorse_ds.schedule.inflight import InFlightLimits
from zorse_ds.schedule.instructions import (
    KINDS,
    CollectiveInstruction,
    ComputeInstruction,
    Instruction,
    StageInstruction,
    TransferInstruction,
)
from zorse_ds.schedule.orders import Compute

Program = tuple[Instruction, ...]
"""What one rank does in a step, in order."""


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameters that several stages hold copies of; the first stage owns them."""

    index: int
    """Position among the model's sets of shared parameters."""
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    """Union of the ranks of all the stages, ascending."""

    @property
    def owner(self) -> int:
        """The stage whose group keeps the optimizer state."""
        return self.stages[0]


@dataclass(frozen=True)
class Trace:
    """A compiled step. A send stands beside its receive, and the calls of one collective stand
    together, so running the list in order cannot deadlock even with blocking sends."""

    plan: Plan
    layout: Layout
    limits: InFlightLimits
    ties: tuple[Tie, ...]
    order: tuple[Compute, ...]
    instructions: tuple[Instruction, ...]
    interleaved: bool = False
    """Each stage steps as soon as its gradients are reduced, without a look at the others."""

    @cached_property
    def programs(self) -> dict[int, Program]:
        """Each rank's sub-list, for ranks 0 to world size - 1."""
        own: dict[int, list[Instruction]] = {rank: [] for rank in range(self.plan.world_size)}
        for instruction in self.instructions:
            own[instruction.rank].append(instruction)
        return {rank: tuple(program) for rank, program in own.items()}

    def project(self, rank: int) -> Program:
        """The instructions of one rank, in order."""
        return self.programs[rank]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over plan and instructions; equal on all ranks or nobody starts."""
        plan = json.dumps(self.plan.to_dict(), sort_keys=True).encode()
        return hashlib.sha256(plan + b"".join(map(_packed, self.instructions))).hexdigest()


def _packed(instruction: Instruction) -> bytes:
    kind = KINDS.index(type(instruction))
    match instruction:
        case ComputeInstruction(rank, stage, micro_batch):
            return struct.pack("<4i", kind, rank, stage, micro_batch)
        case TransferInstruction(rank, transfer):
            return struct.pack("<3i", kind, rank, transfer.index)
        case CollectiveInstruction(rank, index) | StageInstruction(rank, index):
            return struct.pack("<3i", kind, rank, index)
    raise AssertionError(f"unknown instruction {instruction}")


def ties_between_stages(plan: Plan, tied_layers: Iterable[Sequence[int]]) -> tuple[Tie, ...]:
    """Ties whose layers fall into more than one stage; inside one stage parameters are shared.

    `tied_layers` holds, for each set of shared parameters, the pipeline layers that use them.
    """
    ties: list[Tie] = []
    for index, layers in enumerate(tied_layers):
        stages = tuple(sorted({plan.stage_of_layer(layer) for layer in layers}))
        if len(stages) > 1:
            ranks = sorted({rank for stage in stages for rank in plan.group_of_stage(stage).ranks})
            ties.append(Tie(index, stages, tuple(ranks)))
    return tuple(ties)
