"""`"plan": "auto"`: the plan is found when training starts, on the first rank, for all of them."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.cluster_files import cluster_from
from zorse_ds.core.model import ModelShape
from zorse_ds.core.plan import Dtype, Plan
from zorse_ds.core.profile import Profile
from zorse_ds.cost.frozen import FrozenTimes
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import ConfigError
from zorse_ds.integrations.deepspeed.agreement import from_first_rank, together
from zorse_ds.integrations.deepspeed.config import ZorseSettings, settings_of
from zorse_ds.planner.search import search

AUTO = "auto"
STEP_WORKSPACE_BYTES = 8
"""Temporaries of the optimizer's step a parameter, where it is torch's own."""


def wants_auto(config: dict[str, Any] | None) -> bool:
    """The config asks for a plan to be found."""
    return config is not None and settings_of(config).plan == AUTO


def auto_plan(config: dict[str, Any], shape: Callable[[], ModelShape]) -> Plan:
    """The planner's plan for the config's cluster, profile, batch and length.

    Found by the first rank, the same for all. Raises `ConfigError` where something that planning
    needs is missing, what the loaders of the files raise, and `PlannerError` when nothing fits, on
    the first rank, and `WorldError` on the others. Collective: every rank.
    """
    settings, batch = settings_of(config), config.get("train_batch_size")
    _check(settings, batch)
    found: dict[str, Any] | None = None
    with together("finding a plan"):
        if dist.get_rank() == 0:
            setting = _setting(config, settings, shape())
            found = search(setting, int(batch or 0)).best.plan.to_dict()
    return Plan.from_dict(from_first_rank(found))


def _check(settings: ZorseSettings, batch: object) -> None:
    missing = [key for key in ("cluster", "seq_len") if getattr(settings, key) is None]
    if missing:
        raise ConfigError(
            f"zorse.plan is {AUTO!r}, but zorse.{missing[0]} is missing; expected zorse.cluster (a "
            "file, hostfile or description) and zorse.seq_len (tokens of a sample), or a plan"
        )
    if type(batch) is not int or batch < 1:
        raise ConfigError(
            f"zorse.plan is {AUTO!r}, and train_batch_size is {batch!r}; expected the samples of a "
            "step, a whole number of at least 1"
        )


def _setting(config: dict[str, Any], settings: ZorseSettings, shape: ModelShape) -> Setting:
    described = settings.cluster
    if isinstance(described, dict):
        cluster = Cluster.from_dict(described)
    else:
        cluster = cluster_from(str(described))
    if len(cluster.gpus) != dist.get_world_size():
        raise ConfigError(
            f"zorse.cluster has {len(cluster.gpus)} GPUs, but {dist.get_world_size()} ranks were "
            "started; expected one rank a GPU"
        )
    profile = None if settings.profile is None else Profile.load(settings.profile)
    return Setting(
        cluster=cluster,
        model=shape,
        timer=FrozenTimes(timer_of(profile, cluster.known_types)),
        seq_len=settings.seq_len or 1,
        dtype=_dtype(config),
        profile=profile,
        step_workspace_bytes=STEP_WORKSPACE_BYTES,
    )


def _dtype(config: dict[str, Any]) -> Dtype:
    """What the config computes in."""
    names: dict[str, Dtype] = {"bf16": "bfloat16", "fp16": "float16"}
    for key, dtype in names.items():
        if config.get(key, {}).get("enabled"):
            return dtype
    return "float32"
