"""What commands that judge plans read from files: cluster, model and measured times."""

from pathlib import Path
from typing import Any, Literal

from zorse_ds.core.cluster_files import cluster_from
from zorse_ds.core.model import ModelShape
from zorse_ds.core.profile import Profile
from zorse_ds.cost.frozen import FrozenTimes
from zorse_ds.cost.layer_times import timer_of
from zorse_ds.cost.setting import Setting
from zorse_ds.errors import ConfigError

DtypeName = Literal["float32", "bfloat16", "float16"]


def load_setting(
    cluster: str,
    seq_len: int,
    dtype: DtypeName,
    *,
    model: Path | None = None,
    shape: Path | None = None,
    profile: Path | None = None,
    adapters: str | Path | dict[str, Any] | None = None,
) -> Setting:
    """The setting of a command. What a profile lacks is estimated from the GPU catalogue.

    `cluster`: a cluster's file, a hostfile, or the name of an example. The model is a Hugging Face
    folder, a shape file, or that of the profile. Raises `ConfigError` when none or two of them are
    given, and what each file's loader raises. With `adapters`, a LoRA configuration, they alone are
    trained.
    """
    measured = None if profile is None else Profile.load(profile)
    hardware = cluster_from(cluster)
    return Setting(
        cluster=hardware,
        model=_model(model, shape, measured, adapters),
        timer=FrozenTimes(timer_of(measured, hardware.known_types)),
        seq_len=seq_len,
        dtype=dtype,
        profile=measured,
    )


def _model(
    model: Path | None,
    shape: Path | None,
    profile: Profile | None,
    adapters: str | Path | dict[str, Any] | None,
) -> ModelShape:
    if model is not None and shape is not None:
        raise ConfigError("--model and --shape are both given; expected one of them")
    if model is not None:
        # Loading transformers takes seconds, which nobody pays who has a shape or a profile.
        from zorse_ds.integrations.huggingface.shape import model_shape

        return model_shape(model, adapters)
    if adapters is not None:
        raise ConfigError("--adapters is given without --model; expected the model they are for")
    if shape is not None:
        return ModelShape.load(shape)
    if profile is not None:
        return profile.model
    raise ConfigError("no model is given; expected --model, --shape or --profile")
