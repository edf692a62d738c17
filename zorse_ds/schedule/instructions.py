"""What a rank can be told to do. Instructions are small frozen data; names as in DeepSpeed."""

from dataclasses import dataclass

from zorse_ds.core.layout import Transfer


@dataclass(frozen=True, slots=True)
class Instruction:
    """One element of a trace; `rank` executes it."""

    rank: int


@dataclass(frozen=True, slots=True)
class ComputeInstruction(Instruction):
    """Work on one micro-batch (index within the stage's group) of one stage."""

    stage: int
    micro_batch: int


class LoadMicroBatch(ComputeInstruction):
    """Read inputs (first stage) or labels (last stage) of a micro-batch."""

    __slots__ = ()


class ForwardPass(ComputeInstruction):
    """Run the stage's layers on a micro-batch; at the last stage also the loss."""

    __slots__ = ()


class BackwardPass(ComputeInstruction):
    """Propagate gradients through the stage for a micro-batch."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TransferInstruction(Instruction):
    """One end of a message."""

    transfer: Transfer


class SendActivation(TransferInstruction):
    """Hand outputs to the next stage."""

    __slots__ = ()


class RecvActivation(TransferInstruction):
    """Be ready for outputs of the previous stage; a later `ForwardPass` waits for them."""

    __slots__ = ()


class SendGrad(TransferInstruction):
    """Hand gradients of inputs back to the previous stage."""

    __slots__ = ()


class RecvGrad(TransferInstruction):
    """Be ready for gradients of outputs; a later `BackwardPass` waits for them."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StageInstruction(Instruction):
    """Something a rank does alone for one of its stages."""

    stage: int


class PrefetchParams(StageInstruction):
    """Start to copy the own shard of a stage from host memory, where it is kept there."""

    __slots__ = ()


class ReshardParams(StageInstruction):
    """Drop the full parameters of a stage but for the own shard."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class CollectiveInstruction(Instruction):
    """Done by several ranks together; `index` says which stage or tie it is about."""

    index: int


class CountTargets(CollectiveInstruction):
    """Collective: unmasked targets of the whole global batch, told by the last stage's group."""

    __slots__ = ()


class UnshardParams(CollectiveInstruction):
    """Collective: start to gather the full parameters of a stage; its next computation waits."""

    __slots__ = ()


class ReduceTiedGrads(CollectiveInstruction):
    """Collective: sum the gradients of all copies of a tie into its owning stage."""

    __slots__ = ()


class ReduceGrads(CollectiveInstruction):
    """Collective: sum a stage's gradients over its group, each rank keeping its shard."""

    __slots__ = ()


class ReduceGradNorm(CollectiveInstruction):
    """Collective over the world: gradient norm, loss and targets, and so whether to step."""

    __slots__ = ()


class OptimizerStep(CollectiveInstruction):
    """Collective: update the own shard of a stage and gather the new parameters."""

    __slots__ = ()


class BroadcastTiedParams(CollectiveInstruction):
    """Collective: bring the new values of a tie from its owning stage to all copies."""

    __slots__ = ()


KINDS: tuple[type[Instruction], ...] = (
    LoadMicroBatch,
    ForwardPass,
    BackwardPass,
    SendActivation,
    RecvActivation,
    SendGrad,
    RecvGrad,
    CountTargets,
    PrefetchParams,
    UnshardParams,
    ReshardParams,
    ReduceTiedGrads,
    ReduceGrads,
    ReduceGradNorm,
    OptimizerStep,
    BroadcastTiedParams,
)
"""Every kind of instruction; the position is its number in a digest."""


def describe(instruction: Instruction) -> str:
    """`ForwardPass stage 1 micro-batch 3`, for messages to people."""
    name = type(instruction).__name__
    match instruction:
        case ComputeInstruction(_, stage, micro_batch):
            return f"{name} stage {stage} micro-batch {micro_batch}"
        case TransferInstruction(_, t):
            ends = (
                f"stage {t.boundary} rank {t.source_rank}",
                f"stage {t.boundary + 1} rank {t.target_rank}",
            )
            return f"{name} of samples {t.samples} between {ends[0]} and {ends[1]}"
        case CollectiveInstruction(_, index) | StageInstruction(_, index):
            return f"{name} {index}"
    return name
