"""zorse_ds: train Hugging Face language models on mixed GPUs, exactly as one process would.

Names are loaded when first used, so that planning never loads torch, and the watch process
of a job loads nothing but the standard library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zorse_ds.core.plan import Plan
    from zorse_ds.errors import ZorseError
    from zorse_ds.integrations.deepspeed import ZorseEngine, ZorsePipelineModule, initialize
    from zorse_ds.integrations.huggingface.pretrained import from_config, from_pretrained

__version__ = "0.1.0"

_LAZY = {
    "Plan": "zorse_ds.core.plan",
    "ZorseError": "zorse_ds.errors",
    "ZorseEngine": "zorse_ds.integrations.deepspeed",
    "ZorsePipelineModule": "zorse_ds.integrations.deepspeed",
    "initialize": "zorse_ds.integrations.deepspeed",
    "from_config": "zorse_ds.integrations.huggingface.pretrained",
    "from_pretrained": "zorse_ds.integrations.huggingface.pretrained",
}

__all__ = [
    "Plan",
    "ZorseEngine",
    "ZorseError",
    "ZorsePipelineModule",
    "from_config",
    "from_pretrained",
    "initialize",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'zorse_ds' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
