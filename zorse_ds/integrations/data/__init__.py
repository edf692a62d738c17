"""Text of many forms as fixed-length samples for causal language models."""

from zorse_ds.integrations.data.chat import tokenise_chat
from zorse_ds.integrations.data.holdout import Holdout
from zorse_ds.integrations.data.indexed import IndexedSamples, IndexedTokens
from zorse_ds.integrations.data.packing import tokenise_and_pack
from zorse_ds.integrations.data.prepare import cache_key, prepare_once, prepare_text
from zorse_ds.integrations.data.source import load_source, load_stream, source_files
from zorse_ds.integrations.data.stream import SampleStream

__all__ = [
    "Holdout",
    "IndexedSamples",
    "IndexedTokens",
    "SampleStream",
    "cache_key",
    "load_source",
    "load_stream",
    "prepare_once",
    "prepare_text",
    "source_files",
    "tokenise_and_pack",
    "tokenise_chat",
]
