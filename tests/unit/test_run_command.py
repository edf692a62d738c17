"""`zorse run` reads a launcher's command and writes it for fewer hosts or GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exhaustive_plans import peak_timer
from zorse_ds.cli import run_hosts
from zorse_ds.cli.run_command import Host, first_ranks, launch_of
from zorse_ds.cli.run_hosts import answering
from zorse_ds.cli.run_plans import next_start, planner_for
from zorse_ds.core.cluster import Cluster
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Plan
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import ClusterError, ConfigError

SCRIPT = ["train.py", "--num_gpus", "7", "--deepspeed_config", "ds.json"]


def plan(world_size: int) -> Plan:
    gpus = [{"rank": rank, "micro_batches": [1]} for rank in range(world_size)]
    return Plan.from_dict(
        {
            "version": 1,
            "global_batch_size": world_size,
            "groups": [{"name": "a", "gpus": gpus}],
            "stages": [{"group": "a", "layers": [0, 4]}],
        }
    )


def local(*slots: int) -> tuple[Host, ...]:
    return (Host("localhost", slots),)


@pytest.mark.parametrize(
    ("words", "left", "expected"),
    [
        (["deepspeed", "--num_gpus", "4"], (0, 1, 2), ["deepspeed", "--num_gpus", "3"]),
        (["deepspeed", "--num_gpus=4"], (0, 2), ["deepspeed", "--include", "localhost:0,2"]),
        (["deepspeed"], (0, 1), ["deepspeed", "--num_gpus", "2"]),
        (["torchrun", "--nproc-per-node=4"], (1, 3), ["torchrun", "--nproc-per-node", "2"]),
    ],
)
def test_a_local_command_for_fewer_gpus(
    words: list[str], left: tuple[int, ...], expected: list[str], tmp_path: Path
) -> None:
    launch = launch_of([*words, *SCRIPT], num_local_gpus=4)
    assert launch.hosts == local(0, 1, 2, 3)
    assert launch.on(launch.hosts, tmp_path / "hosts") == [*words, *SCRIPT]
    assert launch.on(local(*left), tmp_path / "hosts") == [*expected, *SCRIPT]


def test_torchrun_is_shown_the_gpus_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_of(["torchrun", "--nproc_per_node", "3", *SCRIPT], None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launch.visible(local(0, 1)) == {}
    assert launch.visible(local(0, 2)) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert launch.visible(local(1, 2)) == {"CUDA_VISIBLE_DEVICES": "5,6"}


def test_a_hostfile_without_the_host_that_is_lost(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("h0 slots=2\nh1 slots=3 gpu_type=T4\nh2 slots=1\n")
    words = ["deepspeed", "--hostfile", str(hosts), "--master_addr", "10.0.0.1", *SCRIPT]
    launch, new = launch_of(words, None), tmp_path / "new"
    assert [host.name for host in launch.hosts] == ["h0", "h1", "h2"]
    h0, h1, h2 = launch.hosts
    got = launch.on((h1, h2), new)
    assert got == ["deepspeed", "--hostfile", str(new), "--master_addr", "h1", *SCRIPT]
    assert new.read_text() == "h1 slots=3\nh2 slots=1\n"
    got = launch.on((h0, Host("h1", (0, 2))), new)
    assert got[-len(SCRIPT) - 2 : -len(SCRIPT)] == ["--include", "h0:0,1@h1:0,2"]
    assert got[1:3] == ["--master_addr", "10.0.0.1"]
    # The launcher takes the only host of a hostfile for its own, unless it is told not to.
    assert "--force_multi" in launch.on((h1,), new)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected a command of deepspeed or torchrun"),
        (["python", "train.py"], "expected a command of deepspeed or torchrun"),
        (["deepspeed", "--num_gpus", "2"], "names no script"),
        (["deepspeed", "--include", "localhost:1", *SCRIPT], "--include is given to deepspeed"),
        (["torchrun", "--nnodes", "2", *SCRIPT], "--nnodes is 2"),
        (["torchrun", "--nproc_per_node", "auto", *SCRIPT], "--nproc_per_node is 'auto'"),
    ],
)
def test_commands_that_cannot_be_started_elsewhere_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        launch_of(words, None)


def test_a_check_of_ones_own_says_which_gpus_answer() -> None:
    hosts = (Host("a", (0, 1, 2)), Host("b", (0, 1)), Host("c", (0,)))
    check = "sh -c 'test {host} != b && { test {host} = c || echo checked; echo 0 2; }'"
    assert answering(hosts, check) == (Host("a", (0, 2)), Host("c", (0,)))
    assert answering(hosts, "true") == hosts
    assert answering(hosts, "no-such-program") == ()


def test_a_host_on_the_cpu_has_no_gpus_to_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_hosts, "_run", lambda *_: (0, ["answers all"]))
    assert run_hosts.num_local_gpus() is None


def test_the_next_plan() -> None:
    whole, hosts = plan(4), (Host("a", (0, 1)), Host("b", (0, 1)))
    fallbacks = [plan(1), plan(3), plan(2)]
    same = next_start(whole, hosts, hosts, fallbacks, None)
    assert same is not None and (same.plan, same.hosts) == (whole, hosts)
    left = (Host("a", (1,)), Host("b", (0, 1)))
    found = next_start(whole, hosts, left, fallbacks, None)
    assert found is not None and (found.plan.world_size, found.hosts) == (3, left)
    found = next_start(whole, hosts, left, fallbacks[:1], None)
    assert found is not None and found.hosts == first_ranks(left, 1) == (Host("a", (1,)),)
    assert next_start(whole, hosts, left, [], None) is None
    asked = []

    def planner(what: tuple[Host, ...]) -> Plan:
        asked.append(what)
        return plan(3)

    found = next_start(whole, hosts, left, [], planner)
    assert found is not None and found.plan == plan(3) and asked == [left]


def test_the_planner_plans_for_the_gpus_that_are_left() -> None:
    node = {"intra_gb_per_s": 10.0, "nic_gb_per_s": 1.0}
    mixed = {"name": "a", "gpu_types": ["T4", "A10G"], **node}
    data = {"nodes": [mixed, {"name": "b", "gpu_type": "V100-SXM2-16GB", "num_gpus": 2, **node}]}
    cluster = Cluster.from_dict(data)
    shape = ModelShape.llama("small", 4, 512, 1408, 8)
    setting = Setting(cluster, shape, peak_timer, 128)
    hosts = (Host("a", (0, 1)), Host("b", (0, 1)))
    plan_for = planner_for(setting, hosts, 8)
    found = plan_for((Host("a", (1,)), Host("b", (0, 1))))
    assert (found.world_size, found.global_batch_size, found.num_layers) == (3, 8, 6)
    assert plan_for((Host("b", (1,)),)).world_size == 1
    with pytest.raises(ClusterError, match="the cluster has a with 2, b with 2, but the launcher"):
        planner_for(setting, hosts[:1], 8)
