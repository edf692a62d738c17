"""`zorse run`: a launcher's job, started again on what is left when it lost GPUs or hosts."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from zorse_ds.cli.run_command import Hosts, Launch, launch_of, num_ranks, script_option
from zorse_ds.cli.run_hosts import answering, num_local_gpus, unreachable
from zorse_ds.cli.run_job import Attempt
from zorse_ds.cli.run_plans import Next, load_fallbacks, next_start, planner_for
from zorse_ds.cli.settings import DtypeName, load_setting
from zorse_ds.core.handover import PLAN_VARIABLE, PROGRESS_VARIABLE, Step
from zorse_ds.core.plan import Plan
from zorse_ds.errors import ConfigError
from zorse_ds.files import read_json

_ENV_FILE = ".deepspeed_env"


def run(
    command: Annotated[
        list[str], typer.Argument(help="Behind --: a command of deepspeed or torchrun.")
    ],
    max_restarts: Annotated[int, typer.Option(min=0, help="How often to start again.")] = 3,
    plan: Annotated[
        Path | None, typer.Option(help="The job's plan; default: that of its DeepSpeed JSON.")
    ] = None,
    fallback_plan: Annotated[
        list[Path] | None, typer.Option(help="A plan for fewer GPUs; repeatable.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Plan anew for what is left of this cluster.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="For that: the model's folder.")] = None,
    shape: Annotated[Path | None, typer.Option(help="For that: the model's shape.")] = None,
    profile: Annotated[Path | None, typer.Option(help="For that: measured times.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="For that: tokens of a sample.")
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="For that: compute in this.")] = "bfloat16",
    check: Annotated[
        str | None,
        typer.Option(help="Command that asks {host}: exit code 0, and the numbers of good GPUs."),
    ] = None,
    run_dir: Annotated[
        Path, typer.Option(help="For plans and progress; all hosts must see it.")
    ] = Path("zorse-run"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Run a job; start it again on what still answers. The script resumes its last checkpoint."""
    launch = launch_of(command, _local_gpus(command))
    first = _first_plan(launch, plan)
    fallbacks = load_fallbacks(fallback_plan or [], first)
    files = {"model": model, "shape": shape, "profile": profile}
    plan_for = _planner(launch, first, cluster, seq_len, dtype, files)
    job = Job(launch, run_dir.absolute(), check)
    job.start(Next(first, launch.hosts, "the first start"))
    while job.code != 0 and job.may_go_on(max_restarts):
        left = answering(launch.hosts, check)
        following = next_start(first, launch.hosts, left, fallbacks, plan_for)
        if following is None or not job.is_worth(following):
            _tell_no_plan(following, num_ranks(left))
            break
        job.start(following)
    if as_json:
        print(json.dumps({"exit_code": job.code, "attempts": job.attempts}))
    raise typer.Exit(job.code)


@dataclass
class Job:
    """All attempts. `start` returns when the attempt has ended."""

    launch: Launch
    folder: Path
    check: str | None
    attempts: list[dict[str, Any]] = field(default_factory=list)
    code: int = 0
    _last: Step | None = None
    """Of all attempts."""
    _was_told: bool = False
    _made_step: bool = False
    _now: Next | None = None

    def start(self, following: Next) -> None:
        """Run the launcher to its end."""
        number, self._now = len(self.attempts), following
        self.folder.mkdir(parents=True, exist_ok=True)
        plan_path = self.folder / f"plan-{number}.json"
        progress_path = self.folder / f"progress-{number}"
        progress_path.unlink(missing_ok=True)
        following.plan.save(plan_path)
        told = {PLAN_VARIABLE: str(plan_path), PROGRESS_VARIABLE: str(progress_path)}
        attempt = Attempt(
            self.launch.on(following.hosts, self.folder / f"hostfile-{number}"),
            {**os.environ, **told, **self.launch.visible(following.hosts), **self._shared(told)},
            progress_path,
            lambda: unreachable(following.hosts, self.check),
            self._on_first_step,
        )
        facts: dict[str, Any] = {"plan": str(plan_path), "ranks": num_ranks(following.hosts)}
        self.attempts.append(facts)
        code = attempt.run()
        self.code = 128 - code if code < 0 else code
        self._was_told, self._made_step = attempt.told is not None, attempt.first is not None
        self._last = attempt.last or self._last
        facts |= {
            "exit_code": self.code,
            "first_step": attempt.first and attempt.first.number,
            "last_step": attempt.last and attempt.last.number,
            "lost_hosts": attempt.lost,
        }
        self._tell_end(attempt)

    def may_go_on(self, max_restarts: int) -> bool:
        """Nobody told it to end, and there are starts left."""
        if self._was_told:
            return False
        if len(self.attempts) <= max_restarts:
            return True
        tell(f"{max_restarts} restarts are used up; the job ends with exit code {self.code}")
        return False

    def is_worth(self, following: Next) -> bool:
        """It is not a plan that has just failed before its first step."""
        assert self._now is not None, "there was an attempt"
        if not self._made_step and following.plan == self._now.plan:
            return False
        tell(f"{following.why}; starting {num_ranks(following.hosts)} ranks")
        return True

    def _tell_end(self, attempt: Attempt) -> None:
        if attempt.lost:
            tell(f"out of reach: {', '.join(attempt.lost)}")
        if self.code:
            last = f"step {self._last.number}" if self._last else "no step"
            tell(f"the launcher ended with exit code {self.code}; the last step was {last}")

    def _on_first_step(self, step: Step) -> None:
        if self._last is None or len(self.attempts) < 2:
            return
        seconds = step.at_s - self._last.at_s
        self.attempts[-1]["seconds_lost"] = seconds
        tell(
            f"step {step.number} was made {seconds:.1f} s after step {self._last.number}, the last "
            f"before the loss; {self._last.number - step.number + 1} steps were made again"
        )

    def _shared(self, told: dict[str, str]) -> dict[str, str]:
        """DeepSpeed's launcher takes variables to other hosts from a file."""
        if self.launch.is_local:
            return {}
        name = os.environ.get("DS_ENV_FILE", _ENV_FILE)
        own = [Path(folder, name) for folder in (Path.home(), Path.cwd())]
        lines = [path.read_text().rstrip("\n") for path in dict.fromkeys(own) if path.is_file()]
        lines += [f"{variable}={value}" for variable, value in told.items()]
        path = self.folder / "env"
        path.write_text("\n".join(line for line in lines if line) + "\n")
        return {"DS_ENV_FILE": str(path)}


def _tell_no_plan(following: Next | None, num_left: int) -> None:
    if following is not None:
        tell("no step was made and all is as before, so it is not started again")
        return
    tell(
        f"{num_left} GPUs answer, for which there is no plan; expected --fallback-plan with a plan "
        "for so few, or --cluster"
    )


def _planner(
    launch: Launch,
    plan: Plan,
    cluster: str | None,
    seq_len: int | None,
    dtype: DtypeName,
    files: dict[str, Path | None],
) -> Callable[[Hosts], Plan] | None:
    """Plans for what is left of a cluster, when there is one."""
    if cluster is None:
        return None
    if seq_len is None:
        raise ConfigError("--cluster is given without --seq-len; expected tokens of a sample")
    setting = load_setting(cluster, seq_len, dtype, **files)
    return planner_for(setting, launch.hosts, plan.global_batch_size)


def tell(text: str) -> None:
    """A line among the job's own."""
    print(f"zorse: {text}", file=sys.stderr, flush=True)


def _local_gpus(command: list[str]) -> int | None:
    says_how_many = any(
        word.partition("=")[0] in ("--num_gpus", "--num_accelerators", "--hostfile", "-H")
        for word in command
    )
    return None if says_how_many or "torchrun" in command[0] else num_local_gpus()


def _first_plan(launch: Launch, path: Path | None) -> Plan:
    plan = Plan.load(path) if path is not None else _plan_of_script(launch)
    if plan.world_size != num_ranks(launch.hosts):
        raise ConfigError(
            f"the plan names {plan.world_size} ranks, but the launcher starts "
            f"{num_ranks(launch.hosts)}; expected as many"
        )
    return plan


def _plan_of_script(launch: Launch) -> Plan:
    config = script_option(launch, "--deepspeed_config")
    section = read_json(config, ConfigError).get("zorse") if config else None
    plan = section.get("plan") if isinstance(section, dict) else None
    if isinstance(plan, str) and plan not in ("", "auto"):
        return Plan.load(plan)
    if isinstance(plan, dict):
        return Plan.from_dict(plan)
    raise ConfigError(
        "the script is given no --deepspeed_config whose zorse section has a plan or its path; "
        "expected that, or zorse run --plan FILE (zorse plan -o FILE writes one)"
    )
