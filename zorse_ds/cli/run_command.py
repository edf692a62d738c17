"""A launcher's command: where its ranks run, and the same command for fewer hosts or GPUs."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zorse_ds.core.hostfile import slots_of
from zorse_ds.errors import ConfigError

LOCAL = "localhost"
_DEEPSPEED_COUNT = ("--num_gpus", "--num_accelerators")
_TORCHRUN_COUNT = ("--nproc_per_node", "--nproc-per-node")
_REFUSED = {
    "--include": "-i",
    "--exclude": "-e",
    "--num_nodes": "",
    "--no_ssh": "",
    "--elastic_training": "",
}
_MASTER = ("--master_addr",)


@dataclass(frozen=True)
class Host:
    """A host, and which of its GPUs are used."""

    name: str
    slots: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """The slots are the first ones, which a number says."""
        return self.slots == tuple(range(len(self.slots)))


Hosts = tuple[Host, ...]
"""Ranks are numbered along the hosts and their slots."""


def num_ranks(hosts: Hosts) -> int:
    """One a slot."""
    return sum(len(host.slots) for host in hosts)


def first_ranks(hosts: Hosts, number: int) -> Hosts:
    """The hosts of the first `number` ranks."""
    kept = []
    for host in hosts:
        own = host.slots[:number]
        number -= len(own)
        if own:
            kept.append(replace(host, slots=own))
    return tuple(kept)


@dataclass(frozen=True)
class Launch:
    """A command that starts the ranks; `options` are the launcher's own words, up to the script."""

    words: tuple[str, ...]
    options: int
    is_torchrun: bool
    hosts: Hosts

    @property
    def is_local(self) -> bool:
        """All ranks run here."""
        return self.hosts[0].name == LOCAL

    def on(self, hosts: Hosts, hostfile: Path) -> list[str]:
        """The command for other hosts or fewer slots; writes `hostfile` when it needs one."""
        if hosts == self.hosts:
            return list(self.words)
        options, script = list(self.words[: self.options]), list(self.words[self.options :])
        count = str(num_ranks(hosts))
        if self.is_torchrun:
            return _with(options, _TORCHRUN_COUNT, count) + script
        if self.is_local:
            if hosts[0].is_whole:
                return _with(options, _DEEPSPEED_COUNT, count) + script
            return [*_without(options, _DEEPSPEED_COUNT), "--include", _filter(hosts), *script]
        slots = {host.name: max(host.slots) + 1 for host in hosts}
        hostfile.write_text("".join(f"{name} slots={number}\n" for name, number in slots.items()))
        options = _with(options, ("--hostfile", "-H"), str(hostfile))
        if hosts[0].name != self.hosts[0].name and _value(options, _MASTER):
            options = _with(options, _MASTER, hosts[0].name)
        if len(hosts) == 1 and "--force_multi" not in options:
            # Else the launcher would take the only host for the one it runs on.
            options.append("--force_multi")
        if not all(host.is_whole for host in hosts):
            options += ["--include", _filter(hosts)]
        return options + script

    def visible(self, hosts: Hosts) -> dict[str, str]:
        """What hides GPUs from torchrun that are not used; DeepSpeed's launcher does it itself."""
        if not self.is_torchrun or hosts[0].is_whole:
            return {}
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = seen.split(",") if seen else [str(slot) for slot in self.hosts[0].slots]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[slot] for slot in hosts[0].slots)}


def launch_of(words: Sequence[str], num_local_gpus: int | None) -> Launch:
    """Read a launcher's command. Raises `ConfigError` for one that cannot be started elsewhere.

    `num_local_gpus` is what `deepspeed` uses on one host when nothing says how many.
    """
    program = Path(words[0]).name if words else ""
    is_torchrun = program == "torchrun" or "torch.distributed.run" in words
    if not is_torchrun and program != "deepspeed" and "deepspeed.launcher.runner" not in words:
        raise ConfigError(
            f"behind -- is {' '.join(words) or 'nothing'}; expected a command of deepspeed or "
            "torchrun, such as: zorse run -- deepspeed --num_gpus 4 train.py"
        )
    options = _num_options(words)
    own = list(words[:options])
    hosts = _torchrun_hosts(own) if is_torchrun else _deepspeed_hosts(own, num_local_gpus)
    return Launch(tuple(words), options, is_torchrun, hosts)


def script_option(launch: Launch, name: str) -> str | None:
    """The value of an option of the script."""
    return _value(list(launch.words[launch.options :]), (name,))


def _num_options(words: Sequence[str]) -> int:
    """How many words come before the script, or the module, and what belongs to it.

    The launcher itself may be a module of python, named by the first two words after it.
    """
    for index, word in enumerate(words):
        if index and (word.endswith(".py") or (word in ("--module", "-m") and index > 2)):
            return index
    raise ConfigError(
        f"{' '.join(words)} names no script; expected the path of a .py file, or --module NAME"
    )


def _deepspeed_hosts(options: list[str], num_local_gpus: int | None) -> Hosts:
    for word in options:
        name = word.partition("=")[0]
        if name in _REFUSED or name in _REFUSED.values():
            raise ConfigError(
                f"{name} is given to deepspeed; expected that a hostfile, or --num_gpus on one "
                "host, says which GPUs there are, so that zorse run can leave some out"
            )
    hostfile = _value(options, ("--hostfile", "-H"))
    if hostfile is not None:
        return tuple(Host(name, tuple(range(number))) for name, number in slots_of(hostfile))
    count = _value(options, _DEEPSPEED_COUNT)
    number = num_local_gpus if count is None else _number(count, _DEEPSPEED_COUNT[0])
    if not number:
        raise ConfigError(
            "deepspeed is told no number of ranks; expected --num_gpus, --num_accelerators or "
            "--hostfile"
        )
    return (Host(LOCAL, tuple(range(number))),)


def _torchrun_hosts(options: list[str]) -> Hosts:
    nodes = _value(options, ("--nnodes",))
    if nodes not in (None, "1", "1:1"):
        raise ConfigError(
            f"--nnodes is {nodes}; expected torchrun on one host, or deepspeed with a hostfile, "
            "for torchrun does not start other hosts"
        )
    number = _value(options, _TORCHRUN_COUNT) or "1"
    return (Host(LOCAL, tuple(range(_number(number, _TORCHRUN_COUNT[0])))),)


def _number(value: str, name: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", value):
        raise ConfigError(f"{name} is {value!r}; expected a number of ranks, such as 4")
    return int(value)


def _filter(hosts: Hosts) -> str:
    return "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)


def _value(words: list[str], names: Sequence[str]) -> str | None:
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(words[index + 1 :]), None)
    return None


def _without(words: list[str], names: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in names:
            skip = not equals
        else:
            kept.append(word)
    return kept


def _with(words: list[str], names: Sequence[str], value: str) -> list[str]:
    """The words with the option set, under the name that was used or the first."""
    used = next((w.partition("=")[0] for w in words if w.partition("=")[0] in names), names[0])
    return [*_without(words, names), used, value]
