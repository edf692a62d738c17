"""Measured beats estimated, entry by entry."""

from __future__ import annotations

from typing import Any

import pytest

from zorse_ds.core.model import LayerShape, ModelShape
from zorse_ds.core.plan import Dtype
from zorse_ds.core.profile import Profile
from zorse_ds.cost.estimate import EstimatedTimes
from zorse_ds.cost.layer_bytes import bytes_of, counted_bytes
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import PassTimes
from zorse_ds.errors import ProfileError

MODEL = ModelShape.llama("m", 4, 2048, 5632, 32)
BLOCK = MODEL.kinds["block"]


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "gpu_type": "T4",
        "kind": "block",
        "dtype": "float16",
        "seq_len": 512,
        "micro_batches": [1, 2, 8],
        "forward_s": [1.0, 3.0, 6.0],
        "backward_s": [2.0, 4.0, 13.0],
        **changes,
    }


def profile(*entries: dict[str, Any], **parts: Any) -> Profile:
    model = MODEL.model_dump(mode="json")
    return Profile.from_dict({"model": model, "times": list(entries), **parts})


def asked(timer: Any, size: int, **changes: Any) -> PassTimes:
    where: dict[str, Any] = {"gpu_type": "T4", "kind": "block", "dtype": "float16", "seq_len": 512}
    where |= changes
    shape: LayerShape = MODEL.kinds[where["kind"]]
    found: PassTimes = timer(
        where["gpu_type"], where["kind"], shape, where["dtype"], where["seq_len"], size
    )
    return found


@pytest.mark.parametrize(
    ("size", "forward_s", "backward_s", "source"),
    [
        (1, 1.0, 2.0, "measured"),
        (2, 3.0, 4.0, "measured"),
        (4, 4.0, 7.0, "interpolated"),
        (8, 6.0, 13.0, "measured"),
        (10, 7.0, 16.0, "interpolated"),
    ],
)
def test_sizes_lie_on_lines_between_the_measured_ones(
    size: int, forward_s: float, backward_s: float, source: str
) -> None:
    times = asked(timer_of(profile(entry())), size)
    assert (times.forward_s, times.backward_s) == pytest.approx((forward_s, backward_s))
    assert times.source == source


def test_below_the_smallest_size_a_steep_line_makes_nothing_free() -> None:
    steep = entry(micro_batches=[2, 4], forward_s=[1.0, 3.0], backward_s=[1.0, 1.5])
    times = asked(timer_of(profile(steep)), 1)
    assert times.forward_s == pytest.approx(0.25)
    assert times.backward_s == pytest.approx(0.75)


def test_one_size_is_taken_in_proportion() -> None:
    timer = timer_of(profile(entry(micro_batches=[2], forward_s=[3.0], backward_s=[5.0])))
    assert asked(timer, 4) == PassTimes(6.0, 10.0, "interpolated")


@pytest.mark.parametrize(
    "changes", [{"gpu_type": "L4"}, {"kind": "head"}, {"dtype": "float32"}], ids=str
)
def test_what_has_no_entry_is_estimated(changes: dict[str, Any]) -> None:
    timer, estimate = timer_of(profile(entry())), EstimatedTimes()
    assert asked(timer, 2, **changes) == asked(estimate, 2, **changes)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_another_length_scales_the_estimate(size: int) -> None:
    far = entry(seq_len=4096, forward_s=[50.0, 60.0, 70.0])
    timer, estimate = timer_of(profile(entry(), far)), EstimatedTimes()
    here, there = (asked(estimate, size, seq_len=length) for length in (1024, 512))
    measured = asked(timer, size)
    times = asked(timer, size, seq_len=1024)
    assert times.source == "interpolated"
    assert times.forward_s == pytest.approx(measured.forward_s * here.forward_s / there.forward_s)
    assert times.backward_s == pytest.approx(
        measured.backward_s * here.backward_s / there.backward_s
    )


def test_a_type_that_nobody_knows_needs_no_estimate() -> None:
    timer = timer_of(profile(entry(gpu_type="my card")))
    assert asked(timer, 2, gpu_type="my card") == PassTimes(3.0, 4.0, "measured")
    longer = asked(timer, 2, gpu_type="my card", seq_len=1024)
    work = BLOCK.forward_flops(1024) / BLOCK.forward_flops(512)
    assert longer.forward_s == pytest.approx(3.0 * work)
    with pytest.raises(ProfileError, match=r"no times of head in float16 on my card.*block in"):
        asked(timer, 2, gpu_type="my card", kind="head")
    with pytest.raises(ProfileError, match="'other card' has no measured times"):
        asked(timer, 2, gpu_type="other card")


def test_without_a_profile_all_is_estimated() -> None:
    for given in (None, profile()):
        assert asked(timer_of(given), 4) == asked(EstimatedTimes(), 4)


BYTES = {
    "kind": "block",
    "dtype": "bfloat16",
    "seq_len": 128,
    "saved_bytes": 1000,
    "boundary_bytes": 10,
    "workspace_bytes": 10**9,
}


def test_measured_bytes_beat_counted_ones_and_grow_with_length() -> None:
    lookup = bytes_of(profile(bytes=[BYTES, {**BYTES, "seq_len": 512, "saved_bytes": 8000}]))
    at = lookup("block", BLOCK, "bfloat16", 128, 3)
    assert (at.saved, at.boundary, at.workspace) == (3000, 30, 3 * 10**9)
    longer = lookup("block", BLOCK, "bfloat16", 256, 3)
    assert (longer.saved, longer.boundary) == (6000, 60)
    longest = lookup("block", BLOCK, "bfloat16", 1024, 3)
    assert (longest.saved, longest.boundary) == (48000, 60)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("head", "bfloat16"), ("block", "float32")], ids=lambda each: each
)
def test_bytes_without_an_entry_are_counted(kind: str, dtype: Dtype) -> None:
    shape = MODEL.kinds[kind]
    lookup = bytes_of(profile(bytes=[BYTES]))
    assert lookup(kind, shape, dtype, 128, 2) == counted_bytes(kind, shape, dtype, 128, 2)
