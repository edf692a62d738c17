"""A tokenizer of 50 words, whose text and tokens can be read off each other."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(50)]


def make_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Split at spaces; `<end>` is token 0, `<unk>` 1, `w0` 2, `w1` 3 and so on."""
    vocabulary = {word: i for i, word in enumerate(["<end>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)
