"""Whatever stands in a plan file, only PlanError comes out, and its sentences can be printed."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.random_plans import random_plan_dict
from zorse_ds.core.plan import Plan
from zorse_ds.errors import PlanError


def nested(depth: int, holder: str) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if holder == "list" else {"groups": [value]}
    return value


ATOMS: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 10**30, 10**5000, 1.0, 1.5, 1e308, 5e-324),
    *(math.nan, math.inf, -math.inf),
    *("", "g0", "1f1b", "ministage", "\ud800", "\x00", "x" * 1000),
    *([], {}, [[]], [0, 1], [1, 0], [0, 2**40], {"rank": 0}, {"": 0}, {"\ud800": 1}),
    *(nested(400, "list"), nested(50_000, "list"), nested(300, "dict"), nested(50_000, "dict")),
]
KEYS = ["x", "\ud800", "", "grop", "layers", "rank", "version"]
SHALLOW = [atom for atom in ATOMS if not (isinstance(atom, int) and atom > 10**100)][:-4]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all entries of a small piece of JSON."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in entries:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from paths(item, (*path, key))


def mutated(rng: random.Random, data: dict[str, Any], atoms: list[Any]) -> dict[str, Any]:
    """`data` with one to three entries removed, replaced, repeated or added."""
    chosen = rng.sample(sorted(paths(data), key=repr), 3)
    # The deeper first, so that what is changed later is still there.
    for path in sorted(chosen, key=len, reverse=True)[: rng.randint(1, 3)]:
        holder: Any = data
        for key in path[:-1]:
            holder = holder[key]
        action = rng.choice(["remove", "replace", "replace", "add"])
        if action == "add" and isinstance(holder, dict):
            holder[rng.choice(KEYS)] = rng.choice(atoms)
        elif action == "remove" and isinstance(holder, dict):
            holder.pop(path[-1], None)
        elif isinstance(holder, dict) or path[-1] < len(holder):
            holder[path[-1]] = rng.choice(atoms)
    return data


def parsed(data: Any) -> str:
    """`valid` or `refused`, having looked at the sentences."""
    try:
        plan = Plan.from_dict(data)
    except PlanError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.encode() and "\n" not in problem
        return "refused"
    assert Plan.from_dict(plan.to_dict()) == plan
    return "valid"


@pytest.mark.parametrize("chunk", range(10))
def test_mutated_plans(chunk: int) -> None:
    outcomes = set()
    for seed in range(900 * chunk, 900 * (chunk + 1)):
        rng = random.Random(seed)
        outcomes.add(parsed(mutated(rng, random_plan_dict(seed), ATOMS)))
    # Some changes do no harm; were all refused, the test would not reach the rules behind parsing.
    assert outcomes == {"valid", "refused"}


@pytest.mark.parametrize("seed", range(10))
def test_arbitrary_data(seed: int) -> None:
    rng = random.Random(seed)

    def value(depth: int) -> Any:
        kind = rng.randint(0, 3) if depth else 0
        if kind == 0:
            return rng.choice(ATOMS)
        if kind == 1:
            return [value(depth - 1) for _ in range(rng.randint(0, 3))]
        keys = [*Plan.model_fields, *KEYS]
        return {rng.choice(keys): value(depth - 1) for _ in range(rng.randint(0, 5))}

    assert {parsed(value(4)) for _ in range(100)} == {"refused"}


def test_mutated_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for seed in range(300):
        rng = random.Random(seed)
        text = json.dumps(mutated(rng, random_plan_dict(seed), SHALLOW))
        if seed % 3 == 0:
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(['"', "{", "}", "[", ",", "0", ""]) + text[at + 1 :]
        path.write_text(text)
        try:
            Plan.load(path)
        except PlanError as error:
            assert all(problem.startswith(str(path)) for problem in error.problems)
