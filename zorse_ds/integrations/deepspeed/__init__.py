"""The only door to DeepSpeed."""

from zorse_ds.integrations.deepspeed.config import plan_from_config
from zorse_ds.integrations.deepspeed.engine import ZorseEngine
from zorse_ds.integrations.deepspeed.initialize import initialize
from zorse_ds.integrations.deepspeed.module import ZorsePipelineModule

__all__ = ["ZorseEngine", "ZorsePipelineModule", "initialize", "plan_from_config"]
