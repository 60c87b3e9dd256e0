"""Small tokenizers trained here in the style of known families, as `tokenizers` objects.

GPT-2, Llama 3 and Qwen 2 are byte-level with the families' own expressions; Llama 2 is
SentencePiece-style BPE with byte fallback; `PIECES` are texts that once broke somebody.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST
QWEN_3_5 = (
    CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    + r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST

PIECES = [
    "",
    " ",
    "Hello, world! It's we'll they'd I'M DON'T 'twas",
    "def f(x):\n    if x >= 10:\n\t\treturn {'a': [1, 2, 3]}  # why?\n\n\n",
    "   runs    of\t\tblanks \n\n \n  \r\n\r\n and\u00a0odd\u2003ones\u3000",
    "1234567890 3.14159 1,000,000 ½ ٣٤٥ Ⅷ",
    "Größe naïve Ångström e\u0301 \u1e9b\u0323 \u212b ﬁ",
    "日本語のテキストと中文字符，한국어도 ไทย",
    "مرحبا بالعالم، שלום עולם",
    "👋 👩‍👩‍👧‍👦 🤷🏽‍♀️ 🇩🇪 ❤️‍🔥",
    "\0\x01\x02\x1b[31m\x7f\x85 \ufeff\u200b\u202e",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|><|endoftext|",
    "Donaudampfschifffahrtsgesellschaftskapitän" * 3,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ================ ----------------",
    "▁ <0x41> </s><s> <unk> [INST] hi [/INST]",
    "\U00016d68\U00016d67 \u07fd\u0316 \u1dfa\u0301",
]
CORPUS = [*PIECES, *(" ".join(PIECES[i : i + 4]) for i in range(12))] * 8


def gpt_2(vocab_size: int = 700) -> tokenizers.Tokenizer:
    """GPT-2: its expression is inside ByteLevel; one added token, which is `normalized`."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    train(tok, vocab_size, [])
    tok.add_special_tokens([tokenizers.AddedToken("<|endoftext|>", normalized=True, special=True)])
    return tok


def llama_3(vocab_size: int = 700) -> tokenizers.Tokenizer:
    """Llama 3: split by expression, whole pieces looked up first, every split of a token a merge,
    BOS in front, many special tokens after the merges.
    """
    tok = byte_level(LLAMA_3, vocab_size)
    data = json.loads(tok.to_str())
    vocab = data["model"]["vocab"]
    data["model"]["merges"] = [
        [token[:cut], token[cut:]]
        for token in vocab
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    data["model"]["ignore_merges"] = True
    tok = tokenizers.Tokenizer.from_str(json.dumps(data))
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
    tok.add_special_tokens([*names, *(f"<|reserved_{n}|>" for n in range(20))])
    bos = tok.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|> $B",
        special_tokens=[("<|begin_of_text|>", bos)],
    )
    tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tok


def tekken(vocab_size: int = 700) -> tokenizers.Tokenizer:
    """Mistral Nemo: splits where lower case becomes upper case, BOS in front."""
    data = json.loads(llama_3(vocab_size).to_str())
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": TEKKEN}
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def qwen_2(vocab_size: int = 700) -> tokenizers.Tokenizer:
    """Qwen 2: normalizes to NFC, splits single digits, has visible added tokens."""
    tok = byte_level(QWEN_2, vocab_size)
    tok.normalizer = normalizers.NFC()
    tok.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    shown = ["<tool_call>", "</tool_call>"]
    tok.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in shown])
    return tok


def qwen_3_5(vocab_size: int = 700) -> tokenizers.Tokenizer:
    """Qwen 3.5: marks belong to words, nothing is normalized."""
    return byte_level(QWEN_3_5, vocab_size)


def byte_level(
    pattern: str, vocab_size: int, specials: list[str] | None = None
) -> tokenizers.Tokenizer:
    """A byte-level BPE that splits by `pattern`; `specials` get the first ids."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    train(tok, vocab_size, specials or [])
    return tok


def train(tok: tokenizers.Tokenizer, vocab_size: int, specials: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tok.train_from_iterator(CORPUS, trainer)


def llama_2(vocab_size: int = 900) -> tokenizers.Tokenizer:
    """Llama 2: spaces are ▁, unknown characters fall back to bytes, one ▁ is prepended."""
    tok = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>", *fallback],
        limit_alphabet=120,
    )
    tok.train_from_iterator(CORPUS, trainer)
    data = json.loads(tok.to_str())
    # The trainer makes the bytes special tokens; in Llama 2 they are ordinary entries.
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < 3]
    tok = tokenizers.Tokenizer.from_str(json.dumps(data))
    tok.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tok


def unigram() -> tokenizers.Tokenizer:
    """A SentencePiece Unigram with the Metaspace pair of pre-tokenizer and decoder."""
    tok = tokenizers.Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tok.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=600, show_progress=False, special_tokens=["<unk>", "<s>"], unk_token="<unk>"
    )
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def edited(tok: tokenizers.Tokenizer, **model: Any) -> tokenizers.Tokenizer:
    """`tok` with fields of its model replaced."""
    data = json.loads(tok.to_str())
    data["model"].update(model)
    made: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    return made


def saved(tok: tokenizers.Tokenizer, directory: Path) -> Path:
    """Create `directory` with the tokenizer.json of `tok`."""
    directory.mkdir(parents=True, exist_ok=True)
    tok.save(str(directory / "tokenizer.json"))
    return directory
