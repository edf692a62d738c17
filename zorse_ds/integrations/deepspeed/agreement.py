"""All ranks compare what they are about to run before the first message."""

import json

import deepspeed
import torch

from zorse_ds.core.plan import Plan
from zorse_ds.errors import WorldError
from zorse_ds.runtime.dist_world import DistWorld


def agree_on_start(world: DistWorld, digest: str, plan: Plan) -> None:
    """Collective: raise `WorldError` on every rank if one has another plan, trace or version."""
    own = {
        "torch version": torch.__version__,
        "deepspeed version": deepspeed.__version__,
        "plan": json.dumps(plan.to_dict(), sort_keys=True),
        "trace digest": digest,
    }
    facts = world.gather_objects(own)
    for key in own:
        if any(fact[key] != facts[0][key] for fact in facts):  # type: ignore[index]
            raise WorldError(_disagreement(key, facts))


def _disagreement(key: str, facts: list[object]) -> str:
    values: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        values.setdefault(fact[key], []).append(rank)  # type: ignore[index]
    found = ", ".join(f"{_short(value)} on ranks {ranks}" for value, ranks in values.items())
    return f"the ranks disagree about the {key}: {found}; expected the same on every rank"


def _short(value: str) -> str:
    return repr(value) if len(value) <= 24 else f"{value[:21]!r}…"
