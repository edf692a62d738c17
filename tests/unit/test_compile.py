"""Plans compile to traces that pass all checks, whatever their shape, in linear time."""

import random
import time
from dataclasses import replace

import pytest

from tests.random_plans import random_plan, uniform_plan
from zorse_ds.core.plan import Plan
from zorse_ds.schedule.checks import check_trace
from zorse_ds.schedule.compile import compile_forward, compile_trace
from zorse_ds.schedule.instructions import (
    BackwardPass,
    BroadcastTiedParams,
    CollectiveInstruction,
    ForwardPass,
    OptimizerStep,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from zorse_ds.schedule.trace import Trace, ties_between_stages


def ends_tied(plan: Plan) -> list[tuple[int, int]]:
    """Embedding and head share their weights."""
    return [(0, plan.num_layers - 1)]


@pytest.mark.parametrize("chunk", range(20))
def test_random_plans_compile_and_pass(chunk: int) -> None:
    for seed in range(50 * chunk, 50 * (chunk + 1)):
        plan = random_plan(seed)
        check_trace(compile_trace(plan, tied_layers=ends_tied(plan)))


@pytest.mark.parametrize("chunk", range(4))
def test_evaluation_compiles_and_passes(chunk: int) -> None:
    for seed in range(50 * chunk, 50 * (chunk + 1)):
        trace = compile_forward(random_plan(seed))
        check_trace(trace)
        assert not any(isinstance(each, CollectiveInstruction) for each in trace.instructions)


@pytest.mark.parametrize("chunk", range(4))
def test_short_batches_compile_and_pass(chunk: int) -> None:
    for seed in range(25 * chunk, 25 * (chunk + 1)):
        plan = random_plan(seed)
        for batch_size in {1, 2, max(1, plan.global_batch_size - 1)}:
            short = plan.resized(batch_size)
            check_trace(compile_trace(short, tied_layers=ends_tied(plan)))
            check_trace(compile_forward(short))


def test_a_batch_of_one_leaves_other_ranks_to_the_collectives() -> None:
    trace = compile_trace(uniform_plan(2, 3, 2).resized(1))
    check_trace(trace)
    idle = trace.project(1)
    assert idle
    assert all(isinstance(instruction, CollectiveInstruction) for instruction in idle)
    assert sum(isinstance(each, ForwardPass) for each in trace.instructions) == 2


@pytest.mark.parametrize("seed", range(30))
def test_a_send_stands_beside_its_receive(seed: int) -> None:
    instructions = compile_trace(random_plan(seed)).instructions
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, SendActivation | SendGrad):
            answer = instructions[i + 1]
            kind = RecvActivation if isinstance(instruction, SendActivation) else RecvGrad
            assert isinstance(answer, kind)
            assert answer.transfer == instruction.transfer


@pytest.mark.parametrize("seed", range(30))
def test_calls_of_one_collective_stand_together(seed: int) -> None:
    plan = random_plan(seed)
    trace = compile_trace(plan, tied_layers=ends_tied(plan))
    seen: list[tuple[type, int]] = []
    for each in trace.instructions:
        if isinstance(each, CollectiveInstruction):
            key = (type(each), each.index)
            if not seen or seen[-1] != key:
                assert key not in seen
                seen.append(key)
        elif seen:
            seen.append((type(None), len(seen)))


@pytest.mark.parametrize("seed", range(30))
def test_projection_keeps_every_instruction_in_order(seed: int) -> None:
    trace = compile_trace(random_plan(seed))
    for rank in range(trace.plan.world_size):
        own = tuple(each for each in trace.instructions if each.rank == rank)
        assert trace.project(rank) == own
    assert sum(map(len, trace.programs.values())) == len(trace.instructions)


def test_textbook_1f1b() -> None:
    trace = compile_trace(uniform_plan(3, 1, 4))
    letters = {ForwardPass: "F", BackwardPass: "B"}
    found = [
        " ".join(
            f"{letters[type(each)]}{each.micro_batch}"
            for each in trace.project(rank)
            if isinstance(each, ForwardPass | BackwardPass)
        )
        for rank in range(3)
    ]
    assert found == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_gpipe_runs_all_forwards_first() -> None:
    for rank, program in compile_trace(uniform_plan(3, 1, 4, schedule="gpipe")).programs.items():
        kinds = [type(each) for each in program if isinstance(each, ForwardPass | BackwardPass)]
        assert kinds == [ForwardPass] * 4 + [BackwardPass] * 4, rank


def test_ties_join_the_groups_of_their_stages() -> None:
    plan = uniform_plan(4, 2, 2)
    (tie,) = ties_between_stages(plan, [(3, 0)])
    assert (tie.stages, tie.ranks, tie.owner) == ((0, 3), (0, 1, 6, 7), 0)
    # Inside one stage parameters are shared, so nothing is reduced; numbers stay the model's.
    assert [tie.index for tie in ties_between_stages(plan, [(1, 1), (1, 2)])] == [1]


def positions(trace: Trace, kind: type) -> list[int]:
    return [i for i, each in enumerate(trace.instructions) if isinstance(each, kind)]


@pytest.mark.parametrize("seed", range(30))
def test_a_tie_is_reduced_before_its_stage_and_refreshed_behind_its_step(seed: int) -> None:
    plan = random_plan(seed, num_layers=6)
    trace = compile_trace(plan, tied_layers=ends_tied(plan))
    check_trace(trace)
    if len(plan.stages) == 1:
        assert not trace.ties
        return
    reduced = positions(trace, ReduceTiedGrads)
    refreshed = positions(trace, BroadcastTiedParams)
    owned = [i for i in positions(trace, ReduceGrads) if trace.instructions[i].index == 0]  # type: ignore[attr-defined]
    stepped = [i for i in positions(trace, OptimizerStep) if trace.instructions[i].index == 0]  # type: ignore[attr-defined]
    assert max(reduced) < min(owned)
    assert max(stepped) < min(refreshed)


def test_digest_changes_with_anything() -> None:
    plan = random_plan(3, num_layers=6)
    data = plan.to_dict()
    variants = [data]
    variants.append({**data, "schedule": "gpipe" if plan.schedule == "1f1b" else "1f1b"})
    for key, value in [("zero_level", 3), ("recompute", "full"), ("dtype", "float16")]:
        first, *others = data["groups"]
        variants.append({**data, "groups": [{**first, key: value}, *others]})
    heavier = {**data["groups"][0]["gpus"][0], "shard_weight": 17.0}
    first, *others = data["groups"]
    variants.append({**data, "groups": [{**first, "gpus": [heavier, *first["gpus"][1:]]}, *others]})
    longer = {**data["stages"][-1], "layers": [data["stages"][-1]["layers"][0], 7]}
    variants.append({**data, "stages": [*data["stages"][:-1], longer]})
    traces = [compile_trace(Plan.from_dict(variant)) for variant in variants]
    traces.append(compile_trace(plan.resized(plan.global_batch_size - 1)))
    traces.append(compile_trace(plan, tied_layers=ends_tied(plan)))
    traces.append(compile_forward(plan))
    assert len({trace.digest for trace in traces}) == len(traces)
    assert compile_trace(Plan.from_dict(data)).digest == traces[0].digest


@pytest.mark.parametrize("seed", range(20))
def test_digest_changes_with_the_place_of_any_instruction(seed: int) -> None:
    trace = compile_trace(random_plan(seed))
    rng = random.Random(seed)
    for _ in range(20):
        one, other = rng.sample(range(len(trace.instructions)), 2)
        instructions = list(trace.instructions)
        instructions[one], instructions[other] = instructions[other], instructions[one]
        assert replace(trace, instructions=tuple(instructions)).digest != trace.digest


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_time_grows_linearly(schedule: str) -> None:
    def seconds(micro_batches_a_rank: int) -> float:
        plan = uniform_plan(4, 4, micro_batches_a_rank, schedule=schedule)
        start = time.process_time()
        trace = compile_trace(plan)
        check_trace(trace)
        assert trace.digest
        return time.process_time() - start

    small = min(seconds(40) for _ in range(3))
    large = min(seconds(400) for _ in range(2))
    assert large < 20 * small
