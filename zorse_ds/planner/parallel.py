"""A map over processes that inherit everything: only results travel."""

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

Item = TypeVar("Item")
Result = TypeVar("Result")


def fork_map(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int,
    tell: Callable[[int], None] = lambda done: None,
) -> list[Result]:
    """`[function(item) for item in items]`, the items dealt out to `workers` processes.

    The processes are forked, so `function` and `items` may be anything; results are pickled. An
    exception in any of them is raised here. With one worker nothing is forked. `tell` hears about
    how many are done.
    """
    workers = max(1, min(workers, len(items)))
    children = [_start(function, items[own::workers]) for own in range(1, workers)]

    def told(numbered: tuple[int, Item]) -> Result:
        tell(min(len(items), numbered[0] * workers))
        return function(numbered[1])

    outcomes = [_outcome(told, list(enumerate(items[0::workers])))]
    outcomes += [_finish(child) for child in children]
    results: list[Result | None] = [None] * len(items)
    for own, (failure, values) in enumerate(outcomes):
        if failure is not None:
            raise failure
        results[own::workers] = values
    return cast(list[Result], results)


Outcome = tuple[BaseException | None, list[Any]]
Child = tuple[int, int]
"""Process id, and the pipe its outcome comes through."""


def _outcome(function: Callable[[Item], Result], items: Sequence[Item]) -> Outcome:
    try:
        return None, [function(item) for item in items]
    except BaseException as failure:
        return failure, []


def _start(function: Callable[[Item], Result], items: Sequence[Item]) -> Child:
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    os.close(reader)
    status = 1
    try:
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(_outcome(function, items), pipe)
        status = 0
    finally:
        # Nothing of the parent's may run on in the child.
        os._exit(status)


def _finish(child: Child) -> Outcome:
    process, reader = child
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(process, 0)
    if not data:
        return ChildProcessError(f"worker {process} ended without a result"), []
    return cast(Outcome, pickle.loads(data))
