"""What `zorse plan` prints for people."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zorse_ds.core.gpus import GIB

BAR_WIDTH = 12
_PLAIN: dict[str, Any] = {
    "box": None,
    "pad_edge": False,
    "title_justify": "left",
    "title_style": "bold",
}
MOST_RANKS = 32


def show_answer(console: Console, answer: dict[str, Any], output: Path | None) -> None:
    """The plan, why it is this one, what limits it, the next best, and every GPU's load."""
    plan = answer["plan"]
    console.print(
        f"{answer['step_s']:.4g} s a step of {plan['global_batch_size']} samples, "
        f"{answer['tokens_per_s']:,.0f} tokens/s, {_percent(answer['ceiling_share'])} of the "
        f"compute-only ceiling, schedule {plan.get('schedule', '1f1b')}"
    )
    if answer["price_per_billion_tokens"] is not None:
        console.print(f"{answer['price_per_billion_tokens']:,.0f} per billion tokens")
    if answer["left_out"]:
        console.print(f"Unused, and not numbered in the plan: {', '.join(answer['left_out'])}")
    console.print()
    console.print(_groups(answer["groups"]))
    console.print()
    console.print(
        f"Why: {answer['origin']}; {answer['num_simulated']} plans were simulated of "
        f"{answer['num_costed']} costed"
    )
    for sentence in answer["limits"]:
        console.print(f"Limit: {sentence}")
    for other in answer["alternatives"]:
        console.print(f"Next best of another {other['other']}: {_described(other)}")
    console.print()
    console.print(_ranks(answer["ranks"]))
    rest = len(answer["ranks"]) - MOST_RANKS
    if rest > 0:
        console.print(f"... and {rest} more ranks (zorse simulate --rows shows more)")
    if output is not None:
        console.print(f"\nWritten to {output}")


def show_options(console: Console, answers: dict[str, dict[str, Any]]) -> None:
    """What-ifs beside the plan."""
    base = next(iter(answers.values()))
    table = Table("", *answers, title="What if", **_PLAIN)
    rows = {
        "GPUs": lambda each: str(len(each["ranks"])),
        "samples a step": lambda each: str(each["plan"]["global_batch_size"]),
        "s a step": lambda each: f"{each['step_s']:.4g}",
        "tokens/s": lambda each: f"{each['tokens_per_s']:,.0f}",
        "relative": lambda each: f"{each['tokens_per_s'] / base['tokens_per_s']:.2f}",
        "of the ceiling": lambda each: _percent(each["ceiling_share"]),
        "per billion tokens": lambda each: _price(each["price_per_billion_tokens"]),
        "groups": lambda each: str(len(each["groups"])),
        "schedule": lambda each: each["plan"].get("schedule", "1f1b"),
    }
    for head, cell in rows.items():
        table.add_row(head, *(cell(each) for each in answers.values()))
    console.print()
    console.print(table)


def _groups(groups: list[dict[str, Any]]) -> Table:
    heads = ["group", "GPUs", "layers", "samples", "micro-batch", "zero", "recompute", "offload"]
    table = Table(*heads, "dtype", **_PLAIN)
    for group in groups:
        types = " + ".join(f"{count} {name}" for name, count in group["gpu_types"].items())
        samples = ", ".join(_span(*own) for own in group["samples"].values())
        layers = " ".join(_span(start, stop - 1) for start, stop in group["layers"])
        number = sum(stop - start for start, stop in group["layers"])
        cells = [
            group["name"],
            types,
            layers,
            samples,
            str(group["micro_batch_size"]),
            str(group["zero_level"]) + (", often" if group["reduce_after"] != "step" else ""),
            f"{sum(group['recompute_layers'])} of {number}",
            group["offload"],
            group["dtype"] or "",
        ]
        table.add_row(*map(Text, cells))
    return table


def _ranks(ranks: list[dict[str, Any]]) -> Table:
    table = Table("rank", "GPU", "group", "busy", "", "memory", "", "GiB", **_PLAIN)
    for rank in ranks[:MOST_RANKS]:
        usable = rank["memory"]["usable_bytes"]
        full = rank["peak_bytes"] / usable
        table.add_row(
            str(rank["rank"]),
            rank["gpu_type"],
            Text(rank["group"]),
            _bar(rank["busy_share"]),
            _percent(rank["busy_share"]),
            _bar(full),
            _percent(full),
            f"{rank['peak_bytes'] / GIB:.1f} of {usable / GIB:.1f}",
        )
    return table


def _described(other: dict[str, Any]) -> str:
    visits = f", {other['num_visits']} visits" if other["num_visits"] > 1 else ""
    return (
        f"{other['num_groups']} groups ({other['origin']}), {other['schedule']}{visits}, "
        f"{other['step_s']:.4g} s, would lose {_percent(other['lost_share'])}"
    )


def _bar(share: float) -> str:
    filled = round(min(share, 1.0) * BAR_WIDTH)
    return "█" * filled + "░" * (BAR_WIDTH - filled)


def _span(first: int, last: int) -> str:
    return f"{first}-{last}" if first != last else str(first)


def _price(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
