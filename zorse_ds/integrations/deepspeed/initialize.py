"""`zorse_ds.initialize`: what `deepspeed.initialize` takes and returns, for a ragged plan."""

from typing import Any

from deepspeed import set_optimizer_flags
from deepspeed.runtime import zero
from deepspeed.runtime.config import DeepSpeedConfig

from zorse_ds.core.plan import Plan
from zorse_ds.errors import ConfigError, ModelError
from zorse_ds.integrations.deepspeed.agreement import agree_on_config, together
from zorse_ds.integrations.deepspeed.config import check_config, load_config
from zorse_ds.integrations.deepspeed.data import check_dataset
from zorse_ds.integrations.deepspeed.engine import ZorseEngine
from zorse_ds.integrations.deepspeed.module import ZorsePipelineModule, init_distributed


def initialize(
    args: Any = None,
    model: ZorsePipelineModule | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    config_params: Any = None,
) -> tuple[ZorseEngine, Any, Any, Any]:
    """Make the engine of a `ZorsePipelineModule`.

    Arguments and the result `(engine, optimizer, training_dataloader, lr_scheduler)` are those of
    `deepspeed.initialize`. `train_batch_size` may be left out of the config: the plan knows it.
    Raises `ConfigError`, `ModelError` or `WorldError` with one sentence per problem. Collective:
    every rank calls it.
    """
    if not isinstance(model, ZorsePipelineModule):
        raise ModelError(
            f"initialize was given a {type(model).__name__}; expected a ZorsePipelineModule"
        )
    if mpu is not None:
        raise ConfigError("mpu was given; expected none, for the plan takes its place")
    init_distributed()
    chosen = _chosen_config(args, config_params if config is None else config)
    settings = _settled_config(chosen, model.plan)
    _check_data(training_data)
    zero.partition_parameters.shutdown_init_context()
    config_class = DeepSpeedConfig(settings, model.mpu())
    set_optimizer_flags(config_class, model)
    engine = ZorseEngine(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=model.mpu(),
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=settings,
        config_class=config_class,
    )
    zero.partition_parameters.restore_init_context()
    engine._configure_python_gc()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _settled_config(config: Any, plan: Plan) -> dict[str, Any]:
    """Collective: the config that all ranks have, checked, with the plan's batch size in it."""
    settings = load_config(config)
    agree_on_config(settings)
    check_config(settings, plan)
    settings["train_batch_size"] = plan.global_batch_size
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        settings.pop(key, None)
    return settings


def _check_data(training_data: Any) -> None:
    """Collective: an empty data set is refused, which DeepSpeed would take for none."""
    with together("reading training_data"):
        if training_data is not None:
            check_dataset(training_data)


def _chosen_config(args: Any, config: Any) -> Any:
    """The config given here, or the one that the launcher's `--deepspeed_config` names."""
    from_args = getattr(args, "deepspeed_config", None)
    if (config is None) == (from_args is None):
        found = "none" if config is None else "two"
        raise ConfigError(
            f"{found} of config and --deepspeed_config were given; expected exactly one"
        )
    return config if config is not None else from_args
