"""DeepSpeed's hostfile as a cluster: `worker-1 slots=8 gpu_type=A100-SXM-40GB nic_gb_per_s=12.5`.

DeepSpeed's launcher reads a line's first two words only, so the file stays good for it. What is
not said of links is what is usual for the type (`core.typical`).
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.gpus import gpu_types, type_suggestion
from zorse_ds.core.nodes import MAX_GPUS
from zorse_ds.core.strict import suggestion
from zorse_ds.core.typical import INTER_REGION_GB_PER_S, TYPICAL, typical_links
from zorse_ds.errors import ClusterError

_FIGURES = ("nic_gb_per_s", "intra_gb_per_s", "host_gb_per_s", "host_memory_gib", "price_per_hour")
_KEYS = ("slots", "gpu_type", "region", *_FIGURES)


def load_hostfile(path: str | Path) -> Cluster:
    """Read a hostfile. Raises `ClusterError` with a sentence for each faulty line."""
    return parse_hostfile(_text_of(path), str(path))


def parse_hostfile(text: str, where: str) -> Cluster:
    """The cluster of a hostfile's text; `where` names the file in sentences of `ClusterError`."""
    lines = _lines(text, where, _faults_of)
    return Cluster.from_dict(_cluster_data([_data_of(*line) for line in lines]))


def check_slots(path: str | Path) -> None:
    """Raises `ClusterError` unless a hostfile is good for the launcher; types may be missing."""
    _lines(_text_of(path), str(path), _slot_faults)


def slots_of(path: str | Path) -> list[tuple[str, int]]:
    """Hosts and their slots, in order; types may be missing. Raises `ClusterError`."""
    lines = _lines(_text_of(path), str(path), _slot_faults)
    return [(host, int(settings["slots"])) for host, settings in lines]


def _text_of(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "not UTF-8 text"
        raise ClusterError(f"{path} cannot be read ({reason}); expected a hostfile") from None


Settings = dict[str, str]
"""What follows a host's name, by key."""


def _lines(
    text: str, where: str, faults_of: Callable[[Settings], Iterable[str]]
) -> list[tuple[str, Settings]]:
    """Hosts with their settings. Raises `ClusterError` with all faults of all lines."""
    found: dict[str, Settings] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if words:
            settings, faults = _settings(words[0], words[1:], known_hosts=found)
            faults = faults or list(faults_of(settings))
            problems += [f"{where} line {number}: {fault}" for fault in faults]
            found.setdefault(words[0], settings)
    if not found:
        problems.append(f"{where} names no host; expected lines such as {_EXAMPLE!r}")
    if problems:
        raise ClusterError("\n".join(problems))
    return list(found.items())


_EXAMPLE = "worker-1 slots=8 gpu_type=A100-SXM-40GB"


def _cluster_data(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {"link_figures": TYPICAL, "nodes": list(nodes)}
    if len({node.get("region") for node in nodes}) > 1:
        data["inter_region_gb_per_s"] = INTER_REGION_GB_PER_S
        data["inter_region_gb_per_s_is"] = "per_node"
    return data


def _settings(
    host: str, words: Sequence[str], known_hosts: Container[str]
) -> tuple[Settings, list[str]]:
    """The settings behind a host's name, and what is wrong with their form."""
    settings: Settings = {}
    faults = []
    if host in known_hosts:
        faults.append(f"host {host!r} is named twice; expected each host once")
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _KEYS or not equals or not value:
            faults.append(f"{word!r} is not understood; expected KEY=VALUE{_near(key)}")
        elif key in settings:
            faults.append(f"{key} is given twice; expected it once")
        settings[key] = value
    # DeepSpeed's launcher finds the slots only there.
    if not faults and next(iter(settings), None) != "slots":
        faults.append(f"{host} is not followed by slots=NUMBER; expected such as {_EXAMPLE!r}")
    return settings, faults


def _near(key: str) -> str:
    names = f" with a key of {', '.join(_KEYS)}"
    return f"{names}{suggestion(key, _KEYS)}" if key not in _KEYS else ""


def _slot_faults(settings: Settings) -> Iterator[str]:
    slots = settings["slots"]
    if not re.fullmatch(r"\d{1,4}", slots) or not 1 <= int(slots) <= MAX_GPUS:
        yield f"slots is {slots!r}; expected a whole number from 1 to {MAX_GPUS}"


def _faults_of(settings: Settings) -> Iterator[str]:
    yield from _slot_faults(settings)
    kinds = settings["gpu_type"].split(",") if "gpu_type" in settings else []
    if not kinds:
        yield "gpu_type is missing; expected gpu_type=NAME behind slots, as `zorse gpus` lists them"
    if len(kinds) > 1 and str(len(kinds)) != settings["slots"]:
        yield (
            f"gpu_type names {len(kinds)} GPUs; expected one, or {settings['slots']} as slots says"
        )
    for kind in dict.fromkeys(kinds):
        if kind not in gpu_types():
            near = type_suggestion(kind, gpu_types())
            yield f"gpu_type is {kind!r}, which the catalogue does not know{near}"
    for key in _FIGURES:
        if key in settings and not re.fullmatch(r"\d+(\.\d+)?", settings[key]):
            yield f"{key} is {settings[key]!r}; expected a number such as 12.5"
        elif key in settings and key != "price_per_hour" and float(settings[key]) <= 0:
            yield f"{key} is {settings[key]}; expected more than 0"


def _data_of(host: str, settings: Settings) -> dict[str, Any]:
    """A faultless line's node as in a cluster file."""
    kinds, slots = settings["gpu_type"].split(","), int(settings["slots"])
    # A node of several types is as fast inside as its slowest.
    links = min(
        (typical_links(gpu_types()[kind]) for kind in kinds), key=lambda e: e["intra_gb_per_s"]
    )
    gpus = {"gpu_type": kinds[0], "num_gpus": slots}
    if len(kinds) > 1:
        gpus = {"gpu_types": kinds}
    figures = {key: float(settings[key]) for key in _FIGURES if key in settings}
    region = {"region": settings["region"]} if "region" in settings else {}
    return {"name": host, **gpus, **links, **figures, **region}
