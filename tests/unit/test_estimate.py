"""Estimated layer times: what is known is followed, what is not is close, cross-validated."""

from __future__ import annotations

import csv
from importlib import resources

import pytest

from zorse_ds.core.gpus import gpu_types
from zorse_ds.core.model import LayerShape, ModelShape, llama_block
from zorse_ds.cost.calibration import board_of, measured_layers
from zorse_ds.cost.dtypes import usable_dtype
from zorse_ds.cost.estimate import EstimatedTimes
from zorse_ds.cost.estimate_errors import LEFT_OUT, cross_validated, is_steady
from zorse_ds.cost.estimate_fit import Fit, Observation, default_fit, observations
from zorse_ds.cost.estimate_kernel import Scales
from zorse_ds.errors import ProfileError

BLOCK_7B = llama_block(4096, 11008, 32)
BLOCK_33B = llama_block(6656, 17920, 52)
TIMES = EstimatedTimes()


def file_rows() -> list[dict[str, str]]:
    text = resources.files("zorse_ds.cost").joinpath("layer_latency.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def test_rows_of_known_types_with_a_sane_line_are_used() -> None:
    left_out = [
        row
        for row in file_rows()
        if row["gpu"] == "w6800"
        or abs(float(row["fwd_ms_fixed"])) > 1.5 * float(row["fwd_ms_per_sample"])
    ]
    assert 0 < len(left_out) < 8
    assert len(measured_layers()) == len(file_rows()) - len(left_out)
    assert {row.board.gpu_type for row in measured_layers()} <= set(gpu_types())


def test_shapes_have_the_parameters_that_the_file_states() -> None:
    stated = {row["model"]: int(row["params_per_layer"]) for row in file_rows()}
    for row in measured_layers():
        assert row.shape.num_params == stated[row.model]


def test_every_catalogue_type_has_a_board() -> None:
    lines = resources.files("zorse_ds.cost").joinpath("gpu_boards.csv").read_text("utf-8")
    assert {row["gpu_type"] for row in csv.DictReader(lines.splitlines())} == set(gpu_types())


def test_a_block_of_the_file_takes_what_the_file_says() -> None:
    # llama_7b,a100x40,1024,float16: 2.3848 n + 0.3872 and 4.6803 n + 3.5179 milliseconds.
    for size in (1, 3, 4, 8, 20):
        times = TIMES("A100-SXM-40GB", "block", BLOCK_7B, "bfloat16", 1024, size)
        assert times.source == "interpolated"
        assert times.forward_s == pytest.approx((2.3848 * size + 0.3872) / 1e3, rel=1e-6)
        assert times.backward_s == pytest.approx((4.6803 * size + 3.5179) / 1e3, rel=1e-6)


def is_llama(observation: Observation) -> bool:
    return is_steady(observation) and observation.point.shape.num_ffn_matrices == 3


def keeps_its_clock(observation: Observation) -> bool:
    return is_llama(observation) and not observation.point.slows


@pytest.mark.parametrize("left_out", ["row", "model and length", "model on a type"])
def test_known_types_at_other_models_and_lengths(left_out: str) -> None:
    every = cross_validated(default_fit(), left_out, is_llama)["all"]
    assert every.num_times > 700
    assert every.median_share < 0.035
    assert every.p90_share < 0.115
    steady = cross_validated(default_fit(), left_out, keeps_its_clock)["all"]
    assert steady.median_share < 0.03
    assert steady.p90_share < 0.08


@pytest.mark.parametrize("left_out", ["GPU type", "GPU family"])
def test_types_without_rows(left_out: str) -> None:
    assert cross_validated(default_fit(), left_out, is_llama)["all"].median_share < 0.12


@pytest.mark.parametrize("left_out", ["row", "model on a type", "GPU type"])
def test_held_out_errors_are_those_of_a_new_fit(left_out: str) -> None:
    """The short cut over the inverse against leaving rows out for real."""
    rows = [
        row
        for row in measured_layers()
        if row.board.family in ("A100", "A10G") and row.precision == "float16"
    ]
    scales = Scales()
    # Extra variance of outliers is decided once in the short cut: here there are none.
    observed = observations(rows, scales)
    short = Fit(observed, scales, trusts_all=True)
    errors = short.held_out_errors(LEFT_OUT[left_out])
    group_of = LEFT_OUT[left_out]
    out = group_of(observed[0].point)
    kept = [each for each in observed if group_of(each.point) != out]
    assert 0 < len(kept) < len(observed)
    members = [i for i, each in enumerate(observed) if group_of(each.point) == out]
    again = Fit(kept, scales, trusts_all=True).seconds([observed[i].point for i in members])
    wanted = [s / observed[i].seconds - 1 for i, s in zip(members, again, strict=True)]
    assert list(errors[members]) == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def test_a_row_that_contradicts_all_others_moves_little() -> None:
    rows = [row for row in measured_layers() if row.shape.num_ffn_matrices == 3]
    scales = Scales()
    observed = observations(rows, scales)
    key = next(row.key for row in rows if row.board.gpu_type == "A10G" and row.seq_len == 1024)
    spoilt = [
        Observation(each.point, each.seconds * 3, each.is_clean, each.noise)
        if each.point.row == key
        else each
        for each in observed
    ]
    clean, bent = (EstimatedTimes(fit=Fit(each, scales)) for each in (observed, spoilt))
    for size in (1, 8):
        a, b = (t("A10G", "block", BLOCK_33B, "float16", 1024, size) for t in (clean, bent))
        assert b.forward_s == pytest.approx(a.forward_s, rel=0.06)
        assert b.backward_s == pytest.approx(a.backward_s, rel=0.06)


@pytest.mark.parametrize(
    ("gpu_type", "low", "high"),
    [
        ("A100-SXM-80GB", 0.58, 0.67),
        ("V100-SXM2-16GB", 0.53, 0.63),
        ("A10G", 0.76, 0.84),
        ("L4", 0.31, 0.41),
        ("T4", 0.29, 0.58),
        ("H100-NVL", 0.35, 0.42),
    ],
)
def test_fractions_of_the_peak_of_a_7b_block(gpu_type: str, low: float, high: float) -> None:
    """The ranges that were stated for these types, in float16."""
    for seq_len in (512, 1024, 2048):
        times = TIMES(gpu_type, "block", BLOCK_7B, "float16", seq_len, 16)
        both = 3 * 16 * BLOCK_7B.forward_flops(seq_len) / gpu_types()[gpu_type].tensor_flops
        fraction = both / (times.forward_s + times.backward_s)
        assert low * 0.93 < fraction < high * 1.07


@pytest.mark.parametrize("gpu_type", sorted(gpu_types()))
def test_estimates_of_all_types_are_sane(gpu_type: str) -> None:
    model = ModelShape.llama("m", 2, 6656, 17920, 52)
    board = board_of(gpu_types()[gpu_type])
    dtype = usable_dtype("bfloat16", gpu_types()[gpu_type])
    for kind, shape in model.kinds.items():
        for seq_len in (128, 700, 4096):
            last = 0.0
            for size in (1, 2, 3, 4, 6, 8, 12, 64):
                times = TIMES(gpu_type, kind, shape, "bfloat16", seq_len, size)
                assert times == TIMES(gpu_type, kind, shape, dtype, seq_len, size)
                assert times.forward_s + times.backward_s > last
                last = times.forward_s + times.backward_s
                least = (
                    shape.forward_flops(seq_len) * size / max(board.tensor_flops, board.fp32_flops)
                )
                assert times.forward_s > least
                assert times.backward_s > least


def test_longer_and_wider_takes_longer() -> None:
    def seconds(shape: LayerShape, seq_len: int) -> float:
        times = TIMES("RTX4090", "block", shape, "bfloat16", seq_len, 4)
        return times.forward_s + times.backward_s

    by_length = [seconds(BLOCK_7B, length) for length in (64, 128, 512, 1024, 3000, 8192)]
    assert by_length == sorted(by_length)
    blocks = [llama_block(h, 8 * h // 3, h // 128) for h in (256, 1024, 2048, 4096, 8192, 16384)]
    by_width = [seconds(block, 512) for block in blocks]
    assert by_width == sorted(by_width)


def test_the_stated_error_is_of_the_type_or_of_types() -> None:
    by_type = cross_validated(
        default_fit(), "model on a type", is_llama, lambda each: each.point.board.gpu_type
    )
    assert TIMES.error_of("A10G") == by_type["A10G"]
    assert "A10G" in TIMES.error_source("A10G")
    assert TIMES.error_of("RTX3090") == cross_validated(default_fit(), "GPU type", is_llama)["all"]
    assert "GPU type" in TIMES.error_source("RTX3090")


def test_an_unknown_type_is_named_with_the_nearest() -> None:
    with pytest.raises(ProfileError, match=r"'A100' has no measured times.*'A100-SXM-40GB'"):
        TIMES("A100", "block", BLOCK_7B, "float16", 512, 1)
