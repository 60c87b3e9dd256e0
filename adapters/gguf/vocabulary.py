"""Builds tokenizer.json from the vocabulary in the metadata of a GGUF file.

A byte-level vocabulary has its merges and the name of its pre-tokenization; the regular
expressions are those of the Hugging Face tokenizers that llama.cpp's names refer to. A
SentencePiece vocabulary has scores: every split of a piece into two other pieces is a merge, the
highest score first, as `transformers` converts such files. Gemma 4's has its merges instead.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from adapters.gguf.file import GgufFile

Section = dict[str, Any]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
SENTENCEPIECE = ("llama", "gemma4")
MARK = "▁"  # a space in SentencePiece

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
QWEN_3_5 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST, _LAST = r"[^\r\n\p{L}\p{N}]?", _CONTRACTIONS + "?"
O200K = "|".join(  # the pattern of tiktoken's o200k_base
    (
        f"{_FIRST}{_UPPER}*{_LOWER}+{_LAST}",
        f"{_FIRST}{_UPPER}+{_LOWER}*{_LAST}",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
TEKKEN = "|".join(  # Mistral Nemo and later: as o200k_base, but single digits and no contractions
    (
        f"{_FIRST}{_UPPER}*{_LOWER}+",
        f"{_FIRST}{_UPPER}+{_LOWER}*",
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


class PreTokenization(NamedTuple):
    """How text is split before merging; `pattern` None is GPT-2's expression."""

    pattern: str | None
    normalizes: bool = False  # to NFC
    ignores_merges: bool = False  # a whole piece that is a token is not merged
    adds_bos: bool = False  # default; the file may override it
    splits_digits: bool = False


_LLAMA_3 = PreTokenization(LLAMA_3, ignores_merges=True, adds_bos=True)
PRE_TOKENIZATIONS = {
    "gpt-2": PreTokenization(None),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "lfm2": _LLAMA_3,
    "falcon-h1": _LLAMA_3,
    "qwen2": PreTokenization(QWEN_2, normalizes=True),
    "deepseek-r1-qwen": PreTokenization(QWEN_2),
    "qwen35": PreTokenization(QWEN_3_5),
    "tekken": PreTokenization(TEKKEN, ignores_merges=True, adds_bos=True),
    "stablelm2": PreTokenization(QWEN_2),
    "olmo": PreTokenization(None, normalizes=True),  # OLMoE, with the vocabulary of GPT-NeoX
    "smollm": PreTokenization(None, splits_digits=True),
    "starcoder": PreTokenization(None, splits_digits=True),
    "refact": PreTokenization(None, splits_digits=True),  # Granite 3
    "smaug-bpe": PreTokenization(LLAMA_3, ignores_merges=True),  # SmolLM 3
    "dbrx": PreTokenization(LLAMA_3),  # OLMo 2 and 3
    "gpt-4o": PreTokenization(O200K),  # Phi-4-mini
}


def read_tokenizer(file: GgufFile) -> Section:
    """The content of tokenizer.json. Raises `StartupError`."""
    check_vocabulary(file)
    model = file.text("tokenizer.ggml.model")
    tokens, types = file.texts("tokenizer.ggml.tokens"), file.numbers("tokenizer.ggml.token_type")
    if len(types) not in (0, len(tokens)):
        raise file.error("tokenizer.ggml.token_type is not as long as tokenizer.ggml.tokens")
    kinds = [int(kind) for kind in types] or [NORMAL] * len(tokens)
    vocabulary = {
        token: place
        for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != UNUSED
    }
    added = [
        _added(place, tokens[place], is_special=kind != USER_DEFINED)
        for place, kind in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED) or (kind == UNKNOWN and model in SENTENCEPIECE)
    ]
    if model == "gpt2":
        return _byte_level(file, vocabulary, added)
    return _sentencepiece(file, vocabulary, added)


def check_vocabulary(file: GgufFile) -> None:
    """Raise `StartupError` unless the file has a vocabulary of a known kind; its tokens are not
    read."""
    model, pre = file.text("tokenizer.ggml.model"), file.text("tokenizer.ggml.pre")
    if "tokenizer.ggml.tokens" not in file.keys:
        raise file.error("tokenizer.ggml.tokens is missing")
    if model not in ("gpt2", *SENTENCEPIECE):
        known = ", ".join(("gpt2", *SENTENCEPIECE))
        raise file.error(f"tokenizer.ggml.model {model!r} is not supported; known: {known}")
    if model == "gpt2" and pre not in PRE_TOKENIZATIONS:
        known = ", ".join(PRE_TOKENIZATIONS)
        raise file.error(f"tokenizer.ggml.pre {pre!r} is not supported; known: {known}")


def special_tokens(file: GgufFile, names: Iterable[str]) -> dict[str, str]:
    """The texts of `bos`, `eos`, … of which the metadata has the ids. Raises `StartupError`."""
    tokens = "tokenizer.ggml.tokens"
    ids = {name: file.integer(f"tokenizer.ggml.{name}_token_id") for name in names}
    texts = file.texts_at(tokens, (place for place in ids.values() if place is not None))
    num_tokens = file.num_texts(tokens)
    for name, place in ids.items():
        if place is not None and place not in texts and num_tokens:
            raise file.error(
                f"tokenizer.ggml.{name}_token_id={place} is outside the vocabulary of {num_tokens}"
            )
    return {name: texts[place] for name, place in ids.items() if place in texts}


def _added(place: int, token: str, *, is_special: bool) -> Section:
    return {
        "id": place,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": is_special,
    }


def _byte_level(file: GgufFile, vocabulary: Mapping[str, int], added: list[Section]) -> Section:
    pre = PRE_TOKENIZATIONS[file.text("tokenizer.ggml.pre") or ""]
    by_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": pre.pattern is None,
    }
    steps: list[Section] = [by_bytes]
    if pre.pattern is not None:
        pattern = {"Regex": pre.pattern}
        steps.insert(
            0, {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        )
    if pre.splits_digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre.normalizes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(file, adds_bos=pre.adds_bos),
        "decoder": {**by_bytes, "use_regex": True},
        "model": _bpe_model(
            vocabulary,
            _stored_merges(file),
            ignore_merges=pre.ignores_merges,
        ),
    }


def _pair(file: GgufFile, merge: str) -> list[str]:
    left, blank, right = merge.partition(" ")
    if not blank or not left or not right or " " in right:
        raise file.error(f"tokenizer.ggml.merges: {merge!r} is not a pair of tokens")
    return [left, right]


def _sentencepiece(file: GgufFile, vocabulary: Mapping[str, int], added: list[Section]) -> Section:
    merges = _stored_merges(file)
    if file.text("tokenizer.ggml.model") == "llama":
        merges = _merges_by_score(file, vocabulary, {token["content"] for token in added})
    adds_space = file.flag("tokenizer.ggml.add_space_prefix") is not False
    unknown = special_tokens(file, ["unknown"]).get("unknown")
    replacing = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    prepending = [{"type": "Prepend", "prepend": MARK}] if adds_space else []
    stripping = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [*prepending, replacing]},
        "pre_tokenizer": None,
        "post_processor": _post_processor(file, adds_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *stripping,
            ],
        },
        "model": _bpe_model(
            vocabulary,
            merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _stored_merges(file: GgufFile) -> list[list[str]]:
    return [_pair(file, merge) for merge in file.texts("tokenizer.ggml.merges")]


def _merges_by_score(
    file: GgufFile, vocabulary: Mapping[str, int], added: set[str]
) -> list[list[str]]:
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != file.num_texts("tokenizer.ggml.tokens"):
        raise file.error("tokenizer.ggml.scores is not as long as tokenizer.ggml.tokens")
    found: list[tuple[float, int, str, str]] = []
    for piece, place in vocabulary.items():
        if piece in added:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((scores[place], cut, left, right))
    found.sort(key=lambda each: each[:2], reverse=True)
    return [[left, right] for _, _, left, right in found]


def _bpe_model(vocabulary: Mapping[str, int], merges: list[list[str]], **others: object) -> Section:
    """The `model` section of a BPE tokenizer, with defaults for the fields not in `others`."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **others,
        "vocab": vocabulary,
        "merges": merges,
    }


def _post_processor(file: GgufFile, *, adds_bos: bool) -> Section | None:
    """The post-processor that adds BOS and EOS; None if the file adds neither."""
    given = file.flag("tokenizer.ggml.add_bos_token")
    wanted = {
        "bos": adds_bos if given is None else given,
        "eos": file.flag("tokenizer.ggml.add_eos_token") is True,
    }
    pieces: list[Section] = [{"Sequence": {"id": "A", "type_id": 0}}]
    specials: Section = {}
    names = [name for name, is_wanted in wanted.items() if is_wanted]
    for name, token in special_tokens(file, names).items():
        place = file.integer(f"tokenizer.ggml.{name}_token_id")
        specials[token] = {"id": token, "ids": [place], "tokens": [token]}
        piece = {"SpecialToken": {"id": token, "type_id": 0}}
        pieces.insert(0 if name == "bos" else len(pieces), piece)
    if not specials:
        return None
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": specials,
    }
