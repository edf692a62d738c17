"""Where global batches come from: data sets, loaders and iterators, short ones, evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch.utils.data import DataLoader, IterableDataset

from tests.ranks.engine_cases import (
    Case,
    Reference,
    Result,
    assert_close,
    check,
    make_engine,
    mean_loss,
    run_reference,
    train,
    weights_of,
)
from tests.ranks.engine_models import Sample, batches_of, mlp, plan_of, vectors
from tests.ranks.harness import run_ranks
from zorse_ds import ZorseEngine
from zorse_ds.errors import DataError

SIZE = 7
SHORT = 3
PLAN = plan_of([[[3, 1], [2, 1]], [[2, 5]]], [0, 3, 6], zero=[2, 1], weights=[1, 2, 1])
SAMPLES = vectors(2 * SIZE + SHORT)
UNSHUFFLED = {"zorse": {"data": {"shuffle": False}}}
FULL = batches_of(SAMPLES, [SIZE, SIZE])
EPOCH = batches_of(SAMPLES, [SIZE, SIZE, SHORT])
EVALUATION = {size: vectors(size, seed=size) for size in (1, 4, SIZE, 2 * SIZE + 1)}


def case_of(name: str, batches: Any, **options: Any) -> Case:
    return Case(name, PLAN, batches, **options)


TWO_EPOCHS = case_of("two epochs", [*EPOCH, *EPOCH[:2]], config=UNSHUFFLED)
DROPPED = case_of("drop last", [*FULL, *FULL], config=UNSHUFFLED | {"dataloader_drop_last": True})
DOUBLED = case_of("batch_fn", [[(x + 1, y * 2) for x, y in batch] for batch in FULL])


def from_training_data(case: Case) -> Result:
    engine = make_engine(case, training_data=SAMPLES)
    assert len(engine.training_dataloader) == (2 if case is DROPPED else 3)
    result = train(engine, len(case.batches))
    assert engine.global_samples == sum(map(len, case.batches))
    engine.destroy()
    return result


def from_torch_loader(case: Case) -> Result:
    """A plain loader of collated global batches, over and over."""
    engine = make_engine(case)
    engine.set_dataloader(DataLoader(SAMPLES, batch_size=SIZE))
    result = train(engine, len(case.batches))
    engine.destroy()
    return result


def with_batch_fn(case: Case) -> Result:
    engine = make_engine(case)
    engine.set_batch_fn(lambda batch: (batch[0] + 1, batch[1] * 2))
    result = train(engine, 2, iter(FULL))
    engine.destroy()
    return result


def with_evaluation(case: Case) -> tuple[Result, list[list[float]]]:
    """Batches of several sizes are evaluated before each step."""
    engine = make_engine(case)
    engine.set_dataiterator(iter(FULL))
    losses, evaluated = Result(), []
    for _ in FULL:
        evaluated.append([float(engine.eval_batch(iter([b]))) for b in EVALUATION.values()])
        step = train(engine, 1)
        losses.losses += step.losses
        losses.norms += step.norms
        losses.rates += step.rates
    losses.weights = weights_of(engine)
    engine.destroy()
    return losses, evaluated


def with_logits(case: Case) -> tuple[float, list[Any] | None]:
    engine = make_engine(case)
    loss, outputs = engine.eval_batch(iter([EVALUATION[4]]), return_logits=True)
    engine.destroy()
    return float(loss), outputs


def to_the_end(case: Case) -> list[str]:
    """What every rank sees when an iterator ends, and that training goes on afterwards."""
    engine = make_engine(case)
    events = []
    data_iter: Any = iter(FULL)
    for _ in range(4):
        try:
            events.append(f"{engine.train_batch(data_iter).item():.4f}")
        except DataError as error:
            events.append(str(error))
        data_iter = None
    with pytest.raises(DataError, match="has ended, but eval_batch needs a batch"):
        engine.eval_batch(iter([]))
    events.append(f"{engine.train_batch(iter(FULL)).item():.4f}")
    engine.destroy()
    return events


def unlike(rank: int, case: Case) -> list[str]:
    """The sentences for iterators that do not give every rank the same."""
    engine = make_engine(case)
    sizes = [SAMPLES[: 5 if rank == 1 else 6]]
    contents = [SAMPLES[rank : rank + SIZE]]
    ended = [] if rank == 2 else [SAMPLES[:SIZE]]
    problems = [problem_of(engine, iter(batches)) for batches in (sizes, contents, ended)]
    problems.append(problem_of(engine, iter(["text"])))
    problems.append(problem_of(engine, iter([SAMPLES[: SIZE + 1]])))
    engine.destroy()
    return problems


def problem_of(engine: ZorseEngine, data_iter: Any) -> str:
    try:
        engine.train_batch(data_iter)
    except DataError as error:
        return str(error)
    return "nothing"


class Endless(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        yield from SAMPLES


def refused_data(case: Case) -> list[str]:
    problems = []
    for data in (Endless(), SAMPLES[: SIZE - 1]):
        try:
            make_engine(case, training_data=data).destroy()
        except DataError as error:
            problems.append(str(error))
    engine = make_engine(case)
    problems.append(problem_of(engine, None))
    with pytest.raises(DataError, match="data_sampler was given"):
        engine.deepspeed_io(SAMPLES, data_sampler=range(3))
    engine.destroy()
    return problems


def every_sample_once(case: Case) -> list[list[float]]:
    """The shuffled order: first input of every sample, by epoch."""
    engine = make_engine(case, training_data=SAMPLES)
    loader = engine.training_dataloader
    epochs = []
    for _ in range(2):
        loaded = [batch.load(slice_of(batch.num_samples)) for batch in loader]
        epochs.append([float(x) for inputs, _ in loaded for x in inputs[:, 0]])
    engine.destroy()
    return epochs


def slice_of(size: int) -> Any:
    from zorse_ds.ranges import Range

    return Range(0, size)


def run_everything(rank: int) -> dict[str, Any]:
    specs = case_of("specs", FULL, layers=lambda: [LayerSpec(torch.nn.Linear, 6, 6)] * 6)
    return {
        "two epochs": from_training_data(TWO_EPOCHS),
        "drop last": from_training_data(DROPPED),
        "torch loader": from_torch_loader(case_of("torch loader", [*EPOCH, *EPOCH])),
        "batch_fn": with_batch_fn(DOUBLED),
        "evaluation": with_evaluation(case_of("evaluation", FULL)),
        "logits": with_logits(case_of("logits", FULL)),
        "end": to_the_end(case_of("end", FULL)),
        "unlike": unlike(rank, specs),
        "refused": refused_data(DROPPED),
        "shuffled": every_sample_once(case_of("shuffled", FULL)),
    }


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    by_rank = run_ranks(3, run_everything, timeout_s=120)
    return {name: [result[name] for result in by_rank] for name in by_rank[0]}


def test_a_short_last_batch_is_a_step_of_its_own(results: dict[str, list[Any]]) -> None:
    check(results["two epochs"], run_reference(TWO_EPOCHS))


def test_drop_last_leaves_it_out(results: dict[str, list[Any]]) -> None:
    check(results["drop last"], run_reference(DROPPED))


def test_a_plain_loader_of_global_batches_is_repeated(results: dict[str, list[Any]]) -> None:
    check(results["torch loader"], run_reference(case_of("", [*EPOCH, *EPOCH])))


def test_batch_fn_sees_every_micro_batch(results: dict[str, list[Any]]) -> None:
    check(results["batch_fn"], run_reference(DOUBLED))


def test_evaluation_of_any_size_leaves_training_alone(results: dict[str, list[Any]]) -> None:
    case = case_of("", FULL)
    check([result for result, _ in results["evaluation"]], run_reference(case))
    start = Reference(mlp())
    expected = [float(mean_loss(start, case, batch)[0].detach()) for batch in EVALUATION.values()]
    for _, evaluated in results["evaluation"]:
        assert_close(evaluated[0], expected, "losses of evaluation")
        assert all(not math.isclose(a, b) for a, b in zip(*evaluated, strict=True))


def test_logits_come_to_the_last_stage(results: dict[str, list[Any]]) -> None:
    start = Reference(mlp())
    expected = start(torch.stack([inputs for inputs, _ in EVALUATION[4]])).detach()
    losses, outputs = zip(*results["logits"], strict=True)
    assert len(set(losses)) == 1
    assert outputs[:2] == (None, None)
    assert_close(torch.cat(outputs[2]), expected, "logits")


def test_an_iterator_ends_on_all_ranks_alike(results: dict[str, list[Any]]) -> None:
    events = results["end"]
    assert events[0] == events[1] == events[2]
    ended = (
        "the data iterator has ended, but step 3 needs a batch; expected one global batch a call, "
        "or set_dataloader, which begins again when its loader ends"
    )
    assert events[0][2:4] == [ended, ended]
    assert all(math.isfinite(float(events[0][at])) for at in (0, 1, 4))


def test_ranks_must_be_given_the_same_batch(results: dict[str, list[Any]]) -> None:
    sizes, contents, ended, text, many = results["unlike"][0]
    assert results["unlike"] == [results["unlike"][0]] * 3
    assert "5 to 6 samples" in sizes
    assert "different samples" in contents
    assert "ended on ranks [2]" in ended
    assert "the data iterator gave a str" in text
    assert many == (
        "the data iterator gave 8 samples for step 1, but the plan's global_batch_size is 7; "
        "expected at most 7 in one global batch"
    )


def test_data_that_cannot_be_cut_is_refused(results: dict[str, list[Any]]) -> None:
    for problems in results["refused"]:
        iterable, small, nothing = problems
        assert "is a Endless, which has no order to cut" in iterable
        assert "6 samples, fewer than the global batch of 7" in small
        assert "there is no data" in nothing


def test_an_epoch_visits_every_sample_once_in_one_order(results: dict[str, list[Any]]) -> None:
    first, second = results["shuffled"][0]
    assert results["shuffled"] == [[first, second]] * 3
    assert first != second
    expected = sorted(float(inputs[0]) for inputs, _ in SAMPLES)
    assert sorted(first) == sorted(second) == expected
