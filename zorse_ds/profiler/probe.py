"""`zorse probe` on the ranks themselves: every rank tells of itself, then pairs are measured."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from zorse_ds.profiler.probe_device import device_facts
from zorse_ds.profiler.probe_facts import PairFigures, Pairing, ProbeResult, RankFacts
from zorse_ds.profiler.probe_links import Messenger, pairings

Report = Callable[[int, int, str], None]
"""Told before each measurement: the number of the link, of how many, and its ends. 0: devices."""


def probe(
    rank: int,
    device: torch.device,
    host: str,
    versions: Mapping[str, str],
    report: Report,
) -> ProbeResult:
    """Measure the ranks of the default process group and the links between them.

    `host` names the machine this rank is on; ranks of one host are a node, whatever their numbers.
    Pairs are measured one after the other, so that none disturbs another. Returns the same on every
    rank. Collective: every rank calls it.
    """
    control = dist.new_group(backend="gloo")
    assert control is not None, "every rank is in a group of all"
    report(0, 0, "devices")
    dist.barrier(group=control)
    own = RankFacts(rank, host, device_facts(device), dict(versions))
    ranks: list[RankFacts] = _gathered(own, control)
    messenger = Messenger(rank, device, control)
    todo = pairings([each.host for each in ranks])
    mine: list[PairFigures] = []
    for done, pairing in enumerate(todo, start=1):
        report(done, len(todo), _words(pairing, ranks))
        figures = messenger.measure(pairing)
        if figures is not None:
            mine.append(figures)
    found = {link.pairing: link for links in _gathered(mine, control) for link in links}
    return ProbeResult(tuple(ranks), tuple(found[pairing] for pairing in todo))


def _gathered(value: Any, control: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(values, value, group=control)
    return values


def _words(pairing: Pairing, ranks: list[RankFacts]) -> str:
    a, b = pairing.pairs[0]
    if ranks[a].host == ranks[b].host:
        return f"{ranks[a].host}, ranks {a} and {b}"
    return f"{ranks[a].host} and {ranks[b].host}"
