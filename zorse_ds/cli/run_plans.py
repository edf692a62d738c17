"""The next plan of a job that lost hosts or GPUs, and which of those left it uses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zorse_ds.cli.run_command import LOCAL, Hosts, first_ranks, num_ranks
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.plan import Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import ClusterError, ConfigError, PlannerError
from zorse_ds.planner.objective import choose


@dataclass(frozen=True)
class Next:
    """What to start."""

    plan: Plan
    hosts: Hosts
    why: str


def load_fallbacks(paths: Sequence[Path], plan: Plan) -> list[Plan]:
    """The user's plans for fewer GPUs. Raises `PlanError`, and `ConfigError` for another batch."""
    plans = [Plan.load(path) for path in paths]
    for path, fallback in zip(paths, plans, strict=True):
        for what in ("global_batch_size", "num_layers"):
            found, wanted = getattr(fallback, what), getattr(plan, what)
            if found != wanted:
                raise ConfigError(
                    f"{path}: {what} is {found}, but the job's plan has {wanted}; expected the same"
                )
    return plans


def next_start(
    plan: Plan,
    hosts: Hosts,
    left: Hosts,
    fallbacks: Sequence[Plan],
    plan_for: Callable[[Hosts], Plan] | None,
) -> Next | None:
    """The same plan where all answer; else the largest fallback that fits, else the planner's.

    None when there is no plan for what is left.
    """
    count = num_ranks(left)
    if left == hosts:
        return Next(plan, hosts, "all answer, so the plan stays")
    fitting = [each for each in fallbacks if each.world_size <= count]
    if fitting:
        chosen = max(fitting, key=lambda each: each.world_size)
        why = f"{count} of {num_ranks(hosts)} GPUs answer, {chosen.world_size} are used"
        return Next(chosen, first_ranks(left, chosen.world_size), f"{why}, by a plan given for it")
    if plan_for is None or not count:
        return None
    return Next(plan_for(left), left, f"{count} of {num_ranks(hosts)} GPUs answer; planned anew")


def planner_for(setting: Setting, hosts: Hosts, batch: int) -> Callable[[Hosts], Plan]:
    """Plans for what is left of the cluster. Raises `ClusterError` when it is not the job's."""
    _check_same(setting.cluster, hosts)

    def plan_for(left: Hosts) -> Plan:
        cluster = _part(setting.cluster, left)
        try:
            found = choose(replace(setting, cluster=cluster), batch).found
        except PlannerError as error:
            raise PlannerError(f"for what is left of the cluster: {error}") from None
        return found.best.plan

    return plan_for


def _check_same(cluster: Cluster, hosts: Hosts) -> None:
    nodes = [(cluster.node_name(i), len(node.types)) for i, node in enumerate(cluster.nodes)]
    wanted = [(host.name, len(host.slots)) for host in hosts]
    # What this host is called in the cluster is no matter.
    if wanted[0][0] == LOCAL and len(nodes) == 1:
        nodes = [(LOCAL, nodes[0][1])]
    if nodes != wanted:
        raise ClusterError(
            f"the cluster has {_listed(nodes)}, but the launcher starts {_listed(wanted)}; "
            "expected the same nodes with the same GPUs in the same order"
        )


def _listed(nodes: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} with {number}" for name, number in nodes)


def _part(cluster: Cluster, left: Hosts) -> Cluster:
    """The cluster with the GPUs of `left` alone."""
    slots = {host.name: host.slots for host in left}
    names = [cluster.node_name(index) for index in range(len(cluster.nodes))]
    if left[0].name == LOCAL:
        names = [LOCAL]
    gone = [index for index, name in enumerate(names) if name not in slots]
    part = cluster.without(gone) if gone else cluster
    data = part.to_dict()
    for node, model, host in zip(data["nodes"], part.nodes, left, strict=True):
        node.pop("gpu_type", None)
        node.pop("num_gpus", None)
        node["gpu_types"] = [model.types[slot] for slot in host.slots]
    return Cluster.from_dict(data)
