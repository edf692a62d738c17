"""The timeline joins what several ranks did."""

from zorse_ds.simulator.timeline import Span, Timeline


def test_joined_timelines_are_sorted_and_measured() -> None:
    one = Timeline((Span(0, "ForwardPass", 1.0, 2.0), Span(0, "BackwardPass", 4.0, 7.0)))
    other = Timeline((Span(1, "ForwardPass", 2.0, 3.5), Span(1, "ReduceGrads", 7.0, 8.0)))
    both = Timeline.joined([other, one])
    assert [span.start_s for span in both.spans] == [1.0, 2.0, 4.0, 7.0]
    assert both.step_s == 7.0
    assert (both.busy_s(0), both.busy_s(1)) == (4.0, 1.5)


def test_an_empty_timeline_takes_no_time() -> None:
    assert Timeline(()).step_s == 0.0
