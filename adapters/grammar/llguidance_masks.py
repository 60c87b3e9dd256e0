"""Grammars through llguidance (Earley parser over a lexer of regex derivatives, in Rust).

The library's own end token is an id beyond the vocabulary: which tokens really end an answer is
the sampler's to know, and the grammar only tells when one may come.
"""

import json
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from adapters.grammar.tags import JSON_BLANKS, read_tags, tags_to_lark
from engine.grammar import GrammarError, Mask, TokenTable
from engine.step import Grammar, GrammarKind

MAX_GRAMMAR_SYMBOLS = 100_000
MAX_LINE_LEN = 300


class _Wrapper:
    """A vocabulary in the form that `LLTokenizer` takes; `end` is its id beyond all tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, end: int) -> None:
        names = {token_id: name.encode() for name, token_id in table.special.items()}
        missing = end - len(table.tokens)
        shown = [*table.tokens[:end], *[b""] * missing]
        for token_id in (token_id for token_id in names if token_id < end):
            shown[token_id] = names[token_id]
        self.tokens = [*shown, b"<|podway end|>"]
        self.special_token_ids = sorted({*names, end})
        self.eos_token_id = end
        self._encode = table.encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        return list(self._encode(text))


class LlguidanceCompiler:
    """See `GrammarCompiler`."""

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        self._size = vocab_size
        self._special = table.special
        wrapper = _Wrapper(table, vocab_size)
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocab_size + 1, eos_token=vocab_size)  # type: ignore[arg-type]
        self._limits = LLParserLimits(max_grammar_size=MAX_GRAMMAR_SYMBOLS, verbose_errors=False)

    def compile(self, grammar: Grammar) -> "LlguidanceMatcher":
        try:
            source = self._source(grammar)
        except (ValueError, TypeError, RecursionError) as error:
            raise GrammarError(_line(str(error))) from error
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        _check(matcher)
        return LlguidanceMatcher(matcher, self._size)

    def _source(self, grammar: Grammar) -> str:
        """The grammar as the library reads it. Raises `ValueError`."""
        match grammar.kind:
            case GrammarKind.JSON_OBJECT:
                return _json_schema('{"type": "object"}')
            case GrammarKind.JSON_SCHEMA:
                return _json_schema(grammar.text)
            case GrammarKind.TAGS:
                lark = tags_to_lark(read_tags(grammar.text), self._special)
                return str(LLMatcher.grammar_from_lark(lark))
            case GrammarKind.CHOICE:
                return _choice(grammar.text)
            case GrammarKind.REGEX:
                return str(LLMatcher.grammar_from_regex(grammar.text))
            case GrammarKind.LARK:
                return str(LLMatcher.grammar_from_lark(grammar.text))
            case GrammarKind.EBNF:
                return str(grammar_from("gbnf", grammar.text))


class LlguidanceMatcher:
    """See `Matcher`."""

    __slots__ = ("_inner", "_size")

    def __init__(self, inner: LLMatcher, size: int) -> None:
        self._inner = inner
        self._size = size

    def feed(self, tokens: Sequence[int]) -> None:
        if not self._inner.consume_tokens(list(tokens)):
            raise GrammarError(_line(self._inner.get_error()) or "the output has left the grammar")

    def mask(self) -> Mask:
        bits = self._inner.compute_bitmask()
        _check(self._inner)
        return Mask(bits, bool(bits[self._size >> 3] >> (self._size & 7) & 1))

    def copy(self) -> "LlguidanceMatcher":
        return LlguidanceMatcher(self._inner.deep_copy(), self._size)


def _json_schema(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is a JSON object, true or false")
    if schema is True:
        text = "{}"
    return str(
        LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": JSON_BLANKS})
    )


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices)):
        raise ValueError("a choice is an array of at least one string")
    if "" in choices:
        raise ValueError("a choice has at least one character")
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices))))


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_line(matcher.get_error()))


def _line(text: str) -> str:
    """The library's words on one line: the first, and the one that says what it means."""
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    meant = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *meant[:1]])[:MAX_LINE_LEN]
