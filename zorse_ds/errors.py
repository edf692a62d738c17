"""Every error the product raises for its users, under one root."""

from collections.abc import Iterable


class ZorseError(Exception):
    """Root of all errors raised for users of `zorse_ds`.

    The message is one sentence a problem: where, what was found, what was expected and, where
    there is one, the nearest valid value.
    """


class PlanError(ZorseError):
    """A plan is malformed, contradicts itself, or does not fit the world, model or batch.

    `problems` holds one sentence per problem; all problems of a file are reported together.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class ScheduleError(ZorseError):
    """A trace cannot be run: it would deadlock, overflow a buffer, or leave one filled."""


class ConfigError(ZorseError):
    """The DeepSpeed JSON has an unknown key or one that contradicts the plan."""


class ClusterError(ZorseError):
    """A cluster, hostfile or GPU name is malformed or unknown."""


class ProfileError(ZorseError):
    """A profile is malformed, or lacks what it is asked for."""


class PlannerError(ZorseError):
    """No plan can be found: the sentence says what is missing and the nearest feasible change."""


class ModelError(ZorseError):
    """A model cannot be loaded, is not understood, or does not fit the plan."""


class CheckpointError(ZorseError):
    """A checkpoint is damaged, of another model, or cannot be written or read."""


class DataError(ZorseError):
    """A data set, sample or batch is not what the model or plan needs."""


class TransportError(ZorseError):
    """A message or collective did not arrive in time, or its peer is gone."""


class PeerError(TransportError):
    """Another rank failed first, is gone or has stopped answering; the sentence names it."""


class WorldError(ZorseError):
    """Ranks of one job disagree about plan, model or versions."""


class RehearsalError(ZorseError):
    """A plan or setting cannot be rehearsed, or not with so few cores."""
