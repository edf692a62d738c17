"""Keep a group inside a host, or let it span two? What the simulator says, and what the wire says.

    python -m benchmarks.two_hosts [--rate 200mbit] [--rounds 3] [--steps 3]

Two hosts out of network namespaces (`launch/two_hosts.sh`; root), two ranks on one and one on the
other. Two plans that differ in nothing but which ranks form the group of two: both on one host, or
one on each. `zorse profile` measures the layers and `zorse probe` the ranks and what is inside a
host; the wire is taken as it is shaped, less the headers of its frames. Both plans are simulated
from that, and run by the real engine, through DeepSpeed's multi-node launcher. All of it is done
anew in each round, and the shortest time counts of what is simulated from measurements and of what
is run, for other programs disturb in one direction only.

The masters of the wide group are kept by its first rank (`shard_weight` 1 and 0), so that gradients
go one way and parameters the other: two streams that meet on one shaped wire, with each other's
acknowledgements behind them in its queue, get half of it each, which no model here knows.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.llama_layers import llama_config
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.plan import Plan
from zorse_ds.core.profile import Profile
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import Setting
from zorse_ds.schedule.compile import compile_trace
from zorse_ds.simulator.simulate import simulate

MODEL = llama_config(hidden=256, blocks=3, vocabulary=8192)
LENGTH, BATCH = 64, 8
PAYLOAD_SHARE = 1448 / 1514
"""Of an Ethernet frame that carries a full TCP segment."""
WIRE_LATENCY_US = 100.0
ROOT = Path(__file__).parents[1]
console = Console(highlight=False, width=110)


def plans() -> dict[str, Plan]:
    """The group of two with both ranks on the first host (0 and 1), and with one on each (0, 2)."""
    return {"inside": _plan((0, 1), 2), "spanning": _plan((0, 2), 1)}


def _plan(pair: tuple[int, int], alone: int) -> Plan:
    half = [BATCH // 4] * 2
    wide = [
        {"rank": rank, "micro_batches": half, "shard_weight": weight}
        for rank, weight in zip(pair, (1, 0), strict=True)
    ]
    last = [{"rank": alone, "micro_batches": [BATCH // 4] * 4}]
    groups = [{"name": "wide", "zero_level": 2, "gpus": wide}, {"name": "last", "gpus": last}]
    stages = [{"group": "wide", "layers": [0, 3]}, {"group": "last", "layers": [3, 5]}]
    return Plan.from_dict({"global_batch_size": BATCH, "groups": groups, "stages": stages})


def measured_setting(output: Path, rate: str) -> Setting:
    """This machine's layers, its ranks on the two hosts, and the wire as it is shaped."""
    sizes = ["--seq-len", str(LENGTH), "--micro-batch", f"1,{BATCH // 4},{BATCH}"]
    where = ["--device", "cpu", "--dtype", "float32", "-o", str(output / "profile.json")]
    _run([*_ZORSE, "profile", "--model", str(output / "model"), *sizes, *where], output)
    probe = ["--no_local_rank", "--module", "zorse_ds.cli", "probe"]
    _on_two_hosts(rate, [*probe, "-o", str(output / "probed.json")], output)
    cluster = shaped(json.loads((output / "probed.json").read_text()), rate)
    cluster.save(output / "cluster.json")
    profile = Profile.load(output / "profile.json")
    timer = timer_of(profile, cluster.known_types)
    setting = Setting(cluster, profile.model, timer, LENGTH, dtype="float32", profile=profile)
    return replace(setting, reserve_bytes=0, step_workspace_bytes=8)


def shaped(probed: dict[str, Any], rate: str) -> Cluster:
    """What was probed, but for the wire: short messages pass in the bursts that it allows."""
    gb_per_s = bits_per_s(rate) / 8 / 1e9 * PAYLOAD_SHARE
    nodes = [
        {**node, "nic_gb_per_s": gb_per_s, "nic_latency_us": WIRE_LATENCY_US}
        for node in probed["nodes"]
    ]
    return Cluster.from_dict({**probed, "link_figures": "shaped", "nodes": nodes, "links": []})


def bits_per_s(rate: str) -> float:
    """`200mbit`, as `tc` reads it."""
    for unit, factor in (("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise argparse.ArgumentTypeError(f"a rate is {rate!r}; expected one such as 200mbit")


_ZORSE = [sys.executable, "-m", "zorse_ds.cli"]


def _on_two_hosts(rate: str, words: list[str], output: Path) -> None:
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--master_addr", "10.77.0.1"]
    launcher += ["--hostfile", str(output / "hosts" / "hostfile"), *words]
    hosts = ["--rate", rate, "--slots", "2,1", "--state", str(output / "hosts")]
    _run(["bash", str(ROOT / "launch" / "two_hosts.sh"), *hosts, "--", *launcher], output)


def _run(words: list[str], output: Path) -> None:
    with (output / "log").open("a") as log:
        subprocess.run(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)


def run(args: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Measure, simulate, train."""
    MODEL.save_pretrained(output / "model")
    rows: dict[str, dict[str, Any]] = {
        name: {"every_simulated_s": [], "every_measured_s": []} for name in plans()
    }
    words = ["--no_local_rank", "--module", "benchmarks.two_hosts_ranks", str(output)]
    with console.status("") as status:
        for number in range(args.rounds):
            status.update(f"round {number + 1} of {args.rounds}: measuring layers and ranks")
            setting = measured_setting(output, args.rate)
            status.update(f"round {number + 1} of {args.rounds}: training by both plans")
            _on_two_hosts(args.rate, [*words, str(args.steps)], output)
            seconds = json.loads((output / "seconds.json").read_text())
            for name, plan in plans().items():
                simulation = simulate(compile_trace(plan), setting, record=False)
                rows[name]["every_simulated_s"].append(simulation.step_s)
                rows[name]["every_measured_s"] += seconds[name]
    for own in rows.values():
        own["simulated_s"] = min(own["every_simulated_s"])
        own["measured_s"] = min(own["every_measured_s"])
    return {"rate": args.rate, "plans": rows}


def show(facts: dict[str, Any]) -> None:
    """The table for people."""
    table = Table(f"{facts['rate']} between hosts", "simulated", "measured", "error")
    for name, own in facts["plans"].items():
        error = own["simulated_s"] / own["measured_s"] - 1
        simulated, measured = own["simulated_s"], own["measured_s"]
        table.add_row(
            f"group {name}", f"{simulated:.3f} s", f"{measured:.3f} s", f"{100 * error:+.1f} %"
        )
    inside, spanning = facts["plans"]["inside"], facts["plans"]["spanning"]
    ways = ("simulated_s", "measured_s")
    predicted, measured = (spanning[way] / inside[way] for way in ways)
    error = predicted / measured - 1
    table.add_row(
        "spanning ÷ inside", f"{predicted:.2f}", f"{measured:.2f}", f"{100 * error:+.1f} %"
    )
    predicted, measured = (spanning[way] - inside[way] for way in ways)
    error = predicted / measured - 1
    table.add_row(
        "spanning - inside", f"{predicted:.3f} s", f"{measured:.3f} s", f"{100 * error:+.1f} %"
    )
    console.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", default="200mbit", help="of the wire between the hosts, for tc")
    parser.add_argument("--rounds", type=int, default=3, help="of measuring, and of both plans")
    parser.add_argument("--steps", type=int, default=3, help="timed of each plan and round")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    output = (args.output / "two_hosts").resolve()
    output.mkdir(parents=True, exist_ok=True)
    (output / "log").write_text("")
    bits_per_s(args.rate)
    facts = run(args, output)
    (args.output / "two_hosts.json").write_text(json.dumps(facts, indent=2))
    show(facts)


if __name__ == "__main__":
    main()
