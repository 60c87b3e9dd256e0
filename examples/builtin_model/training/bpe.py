"""The tokenizer: byte-level BPE, one token per digit, with its special tokens at the end.

The split pattern is Qwen's, so any loader of byte-level `tokenizer.json` files knows it.
"""

import json
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(PLAIN),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus is too small for the vocabulary"
    return tokenizer


def tokenizer_config(chat_template: str) -> str:
    return json.dumps(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32768,
            "additional_special_tokens": [IM_START, IM_END],
            "chat_template": chat_template,
        },
        indent=2,
    )
