"""Grammars compiled by llguidance (Earley parser over a lexer of regex derivatives, in Rust).

The library's end token is an id beyond the vocabulary. The sampler knows which tokens end an
output; the grammar only reports where the output may end.
"""

import json
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from adapters.grammar.parts import JSON_BLANKS
from adapters.grammar.tags import read_tags, tags_to_lark
from engine.grammar import GrammarError, Mask, TokenTable
from engine.step import Grammar, GrammarKind

MAX_GRAMMAR_SYMBOLS = 100_000
MAX_ROW_ITEMS = 2_850  # 4 for each of 700 optional properties of an object, and a few others
MAX_LINE_LEN = 300
# The library's name for a parser without a next token, in our words.
WORDS = {"NoExtensionBias": "no text can match it: a $ref or a rule leads only back to itself"}


class _TokenizerWrapper:
    """A vocabulary in the form of `LLTokenizer`; `end` is the id of the end token."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, end: int) -> None:
        names = {token_id: name.encode() for name, token_id in table.special.items()}
        missing = end - len(table.tokens)
        tokens = [*table.tokens[:end], *[b""] * missing]
        for token_id in (token_id for token_id in names if token_id < end):
            tokens[token_id] = names[token_id]
        self.tokens = [*tokens, b"<|podway end|>"]
        self.special_token_ids = sorted({*names, end})
        self.eos_token_id = end
        self._encode = table.encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        return list(self._encode(text))


class LlguidanceCompiler:
    """A `GrammarCompiler` that calls llguidance."""

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        """`vocab_size` is the model's, which may have more ids than the token table. A large
        vocabulary takes seconds."""
        self._size = vocab_size
        self._special = table.special
        wrapper = _TokenizerWrapper(table, vocab_size)
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocab_size + 1, eos_token=vocab_size)  # type: ignore[arg-type]
        self._limits = LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            max_items_in_row=MAX_ROW_ITEMS,
            verbose_errors=False,
        )

    def compile(self, grammar: Grammar) -> "LlguidanceMatcher":
        try:
            source = self._source(grammar)
        except (ValueError, TypeError, RecursionError) as error:
            raise GrammarError(_line(str(error))) from error
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        _check(matcher)
        return LlguidanceMatcher(matcher, self._size)

    def _source(self, grammar: Grammar) -> str:
        """The grammar in the library's own form. Raises `ValueError`."""
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
    """A `Matcher` over llguidance's `LLMatcher`."""

    __slots__ = ("_inner", "_size")

    def __init__(self, inner: LLMatcher, size: int) -> None:
        self._inner = inner
        self._size = size

    def feed(self, tokens: Sequence[int]) -> None:
        if not self._inner.consume_tokens(list(tokens)):
            raise GrammarError(
                _line(self._inner.get_error()) or "the output does not match the grammar"
            )

    def mask(self) -> Mask:
        bits = self._inner.compute_bitmask()
        _check(self._inner)
        return Mask(bits, bool(bits[self._size >> 3] >> (self._size & 7) & 1))

    def copy(self) -> "LlguidanceMatcher":
        return LlguidanceMatcher(self._inner.deep_copy(), self._size)


def _json_schema(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema must be a JSON object, true or false")
    if schema is True:
        text = "{}"
    return str(
        LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": JSON_BLANKS})
    )


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices)):
        raise ValueError("choices must be an array of at least one string")
    if "" in choices:
        raise ValueError("a choice must have at least one character")
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices))))


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_line(matcher.get_error()))


def _line(text: str) -> str:
    """The library's message on one line: its first line and the first one with a cause."""
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    causes = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    line = " ".join([lines[0], *causes[:1]])[:MAX_LINE_LEN]
    return WORDS.get(line, line)
