"""A simulated or measured step as a trace file for Perfetto and chrome://tracing."""

from typing import Any

from zorse_ds.simulator.timeline import Span, Timeline

PROGRAM, BACKGROUND = 0, 1
"""Rows of a rank: what it does itself, and what runs beside it."""


def chrome_trace(timeline: Timeline, background: Timeline, labels: list[str]) -> dict[str, Any]:
    """The Trace Event Format: a process a rank (named by `labels`), times in microseconds."""
    events: list[dict[str, Any]] = []
    for rank, label in enumerate(labels):
        events += [
            _meta("process_name", rank, PROGRAM, label),
            _meta("process_sort_index", rank, PROGRAM, rank),
            _meta("thread_name", rank, PROGRAM, "program"),
            _meta("thread_name", rank, BACKGROUND, "messages, gathers, copies"),
        ]
    events += [_event(span, PROGRAM) for span in timeline.spans]
    # Spans of one row must nest: those that run at once are told apart as asynchronous events.
    for number, span in enumerate(background.spans):
        events += _beside(span, number)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(name: str, rank: int, row: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if isinstance(value, int) else "name"
    return {"ph": "M", "name": name, "pid": rank, "tid": row, "args": {key: value}}


def _event(span: Span, row: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": "program",
        "pid": span.rank,
        "tid": row,
        "ts": span.start_s * 1e6,
        "dur": (span.stop_s - span.start_s) * 1e6,
        "args": _arguments(span),
    }


def _beside(span: Span, number: int) -> list[dict[str, Any]]:
    common = {
        "name": span.name,
        "cat": "background",
        "id": number,
        "pid": span.rank,
        "tid": BACKGROUND,
    }
    return [
        {**common, "ph": "b", "ts": span.start_s * 1e6, "args": _arguments(span)},
        {**common, "ph": "e", "ts": span.stop_s * 1e6},
    ]


def _arguments(span: Span) -> dict[str, int]:
    found = {"stage": span.stage, "micro_batch": span.micro_batch}
    return {key: value for key, value in found.items() if value is not None}
