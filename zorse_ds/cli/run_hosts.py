"""Which hosts and GPUs of a job still answer.

A host is asked through ssh, as the launcher reaches it; there each GPU must add two numbers. The
user's own command may be asked instead.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from zorse_ds.cli.run_command import LOCAL, Host, Hosts

ANSWER_S = 60.0
"""How long a host may take: torch is loaded there."""
REACH_S = 8.0
"""How long ssh may take to reach a host."""
_TRY_GPUS = (
    "import torch, os\n"
    "cuda = torch.cuda.is_available() and os.environ.get('DS_ACCELERATOR') != 'cpu'\n"
    "for i in range(torch.cuda.device_count() if cuda else 0):\n"
    "    assert (torch.ones(1, device=f'cuda:{i}') + 1).item() == 2\n"
    "    print('answers', i, flush=True)\n"
    "print('answers' if cuda else 'answers all', flush=True)\n"
)
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={int(REACH_S)}")


def answering(hosts: Hosts, check: str | None) -> Hosts:
    """Hosts that answer, with the slots that do.

    `check` is a command line, in which {host} stands for the host. Exit code 0 says that the host
    answers; numbers in its last line, if there are any, are the GPUs that do.
    """
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(lambda host: _answer(host, check), hosts))
    return tuple(host for host in answers if host.slots)


def unreachable(hosts: Hosts, check: str | None) -> list[str]:
    """Names of other hosts that cannot be reached: a quick look, while the job stands still."""
    others = [host for host in hosts if host.name != LOCAL]
    with ThreadPoolExecutor(max_workers=32) as pool:
        reached = list(pool.map(lambda host: _is_reached(host, check), others))
    return [host.name for host, is_there in zip(others, reached, strict=True) if not is_there]


def num_local_gpus() -> int | None:
    """GPUs that DeepSpeed would use here; None where it would use the CPU."""
    found = _slots(_run((sys.executable, "-c", _TRY_GPUS), ANSWER_S)[1])
    return None if not found else len(found)


def _answer(host: Host, check: str | None) -> Host:
    if check is not None:
        code, lines = _run(_own_check(check, host), ANSWER_S)
        told = [word for word in lines[-1].split() if word.isdigit()] if lines else []
        return _kept(host, None if code == 0 and not told else {int(word) for word in told}, code)
    command: tuple[str, ...] = (sys.executable, "-c", _TRY_GPUS)
    if host.name != LOCAL:
        command = (*_SSH, host.name, shlex.join(command))
    code, lines = _run(command, ANSWER_S)
    if "answers all" in lines:
        return host
    # A GPU that hangs keeps those behind it from answering, and not those before it.
    return _kept(host, _slots(lines), 0)


def _kept(host: Host, answering_slots: set[int] | None, code: int | None) -> Host:
    if code != 0:
        return replace(host, slots=())
    if answering_slots is None:
        return host
    return replace(host, slots=tuple(slot for slot in host.slots if slot in answering_slots))


def _is_reached(host: Host, check: str | None) -> bool:
    command = (*_SSH, host.name, "true") if check is None else _own_check(check, host)
    return _run(command, REACH_S + 2)[0] == 0


def _own_check(check: str, host: Host) -> tuple[str, ...]:
    return tuple(shlex.split(check.replace("{host}", host.name)))


def _slots(lines: Sequence[str]) -> set[int]:
    words = [line.split() for line in lines]
    # "answers all" is what a host says that has no GPUs to number.
    told = [pair[1] for pair in words if len(pair) == 2 and pair[0] == "answers"]
    return {int(word) for word in told if word.isdecimal()}


def _run(command: Sequence[str], timeout_s: float) -> tuple[int | None, list[str]]:
    """Exit code (None: it did not end in time, or could not begin), and the lines it printed."""
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        text = late.stdout or b""
        return None, (text.decode() if isinstance(text, bytes) else text).splitlines()
    except OSError:
        return None, []
    return ended.returncode, [line for line in ended.stdout.splitlines() if line.strip()]
