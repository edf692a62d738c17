"""Hugging Face causal language models as pipeline stages: loading, running, saving."""

from zorse_ds.integrations.huggingface.collate import collate_causal_lm, collate_for
from zorse_ds.integrations.huggingface.loss import CausalLMLoss, count_targets
from zorse_ds.integrations.huggingface.saving import weights_file_name, write_index_and_config
from zorse_ds.integrations.huggingface.stage import CausalLMStage
from zorse_ds.integrations.huggingface.stage_weights import write_stage_weights
from zorse_ds.integrations.huggingface.stages import CausalLMStages

__all__ = [
    "CausalLMLoss",
    "CausalLMStage",
    "CausalLMStages",
    "collate_causal_lm",
    "collate_for",
    "count_targets",
    "weights_file_name",
    "write_index_and_config",
    "write_stage_weights",
]
