"""W&B's run of a job: started so that it never stops training, described, ended."""

import importlib.util
import os
import platform
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deepspeed.utils import logger

from zorse_ds.core.plan import Plan
from zorse_ds.errors import ConfigError
from zorse_ds.files import write_text
from zorse_ds.integrations.deepspeed.config import MonitorSettings

_ID_FILE = "wandb_run_id"
_VERSIONS = ("zorse_ds", "torch", "deepspeed", "transformers", "peft", "datasets")


class WandbRun:
    """The one run of a job, on rank 0; DeepSpeed's monitor finds it and writes into it.

    Without a key or a network it is kept offline, with a warning. In the same `folder` a later job
    goes on with it. Raises `ConfigError` when wandb is not installed.
    """

    def __init__(self, section: dict[str, Any], folder: str | None) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "wandb is enabled, but the package is not installed; expected `pip install wandb`"
            )
        options = {
            "project": section.get("project", "deepspeed"),
            "group": section.get("group"),
            "entity": section.get("team"),
        }
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            options |= {"dir": folder, "id": _id_in(Path(folder)), "resume": "allow"}
        self._run = _started(options)

    def describe(
        self,
        plan: Plan,
        config: dict[str, Any],
        settings: MonitorSettings,
        gpu_types: Sequence[str],
    ) -> None:
        """Write plan, cluster, configuration and versions into the run's config."""
        self._run.config.update(
            {
                "plan": plan.to_dict(),
                "cluster": settings.cluster,
                "gpu_types": list(gpu_types),
                "deepspeed": {key: value for key, value in config.items() if key != "zorse"},
                "predicted_step_s": settings.predicted_step_s,
                "versions": {name: version(name) for name in _VERSIONS}
                | {"python": platform.python_version()},
            },
            allow_val_change=True,
        )

    def show(self, name: str, picture: Path, step: int) -> None:
        """Add a picture to the curves."""
        import wandb

        self._run.log({name: wandb.Image(str(picture))}, step=step)

    def close(self) -> None:
        """End the run: an offline one is whole only then."""
        self._run.finish()


def _started(options: dict[str, Any]) -> Any:
    import wandb

    try:
        with _nobody_to_ask():
            return wandb.init(**options)
    except wandb.errors.Error as problem:
        reason = str(problem).strip().splitlines()[0]
        logger.warning(f"W&B keeps its files here and sends nothing: {reason}")
        # By the environment, which wandb reads anew after this: DeepSpeed's monitor asks for a run
        # too, and must not be asked for a key before it is given this one.
        wandb.teardown()
        os.environ["WANDB_MODE"] = "offline"
        return wandb.init(**options)


@contextmanager
def _nobody_to_ask() -> Iterator[None]:
    """Without a key, W&B would ask on the terminal and all ranks would wait."""
    given = sys.stdin
    with open(os.devnull) as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = given


def _id_in(folder: Path) -> str:
    """The run's id, the same for all jobs in a folder."""
    path = folder / _ID_FILE
    if not path.is_file():
        write_text(path, secrets.token_hex(4))
    return path.read_text().strip()
