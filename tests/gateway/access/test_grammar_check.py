"""A grammar is checked off the loop, within limits, once; what is wrong with it names the field."""

import asyncio
import json
import threading

import pytest

from engine.errors import InvalidRequest
from engine.grammar import GrammarError, Mask
from engine.step import Grammar, GrammarKind
from gateway.access.grammar_check import GrammarCheck, GrammarLimits
from tests.gateway.rig import byte_grammars

REGEX = GrammarKind.REGEX
SCHEMA = GrammarKind.JSON_SCHEMA
FIELD = "response_format.json_schema.schema"


class FakeMatcher:
    """Allows everything, or nothing."""

    def __init__(self, bits: bytes = b"\xff") -> None:
        self.bits = bits

    def feed(self, tokens: object) -> None: ...

    def mask(self) -> Mask:
        return Mask(self.bits, accepts=False)

    def copy(self) -> "FakeMatcher":
        return self


class FakeCompiler:
    """Does what the grammar's text says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()

    def compile(self, grammar: Grammar) -> FakeMatcher:
        self.compiled.append(grammar.text)
        self.threads.add(threading.current_thread().name)
        if grammar.text == "slow":
            self.gate.wait()
        if grammar.text == "bad":
            raise GrammarError("no such thing.")
        return FakeMatcher(b"\0" if grammar.text == "dead" else b"\xff")


def judge(
    compiler: FakeCompiler, *texts: str, limits: GrammarLimits | None = None
) -> list[InvalidRequest | None]:
    """The complaints about several grammars that are checked at the same time."""

    async def main() -> list[InvalidRequest | None]:
        check = GrammarCheck(compiler, limits)
        found = await asyncio.gather(
            *(check.check_grammar(Grammar(REGEX, text), "regex") for text in texts),
            return_exceptions=True,
        )
        compiler.gate.set()
        return [one if isinstance(one, InvalidRequest) else None for one in found]

    return asyncio.run(main())


def test_a_good_grammar_is_compiled_once_and_not_on_the_loop() -> None:
    compiler = FakeCompiler()
    assert judge(compiler, "good", "good", "good") == [None] * 3
    assert compiler.compiled == ["good"]
    assert compiler.threads != {threading.current_thread().name}


def test_an_invalid_grammar_is_rejected_each_time_and_compiled_once() -> None:
    compiler = FakeCompiler()
    for error in judge(compiler, "bad", "bad"):
        assert error is not None
        assert (str(error), error.param) == ("Invalid 'regex': no such thing.", "regex")
    assert compiler.compiled == ["bad"]


def test_a_grammar_without_a_first_token_is_rejected() -> None:
    (error,) = judge(FakeCompiler(), "dead")
    assert "no text of this model's tokens" in str(error)


def test_a_grammar_that_compiles_too_slowly_is_rejected_and_delays_no_other() -> None:
    slow, good = judge(FakeCompiler(), "slow", "good", limits=GrammarLimits(compile_seconds=0.05))
    assert "longer than 0.05 seconds" in str(slow)
    assert good is None


def test_the_oldest_results_are_evicted() -> None:
    compiler = FakeCompiler()
    texts = ["1", "2", "3"]

    async def main() -> None:
        check = GrammarCheck(compiler, GrammarLimits(max_remembered=2))
        for text in (*texts, *texts[1:], *texts):
            await check.check_grammar(Grammar(REGEX, text), "regex")

    asyncio.run(main())
    assert compiler.compiled == [*texts, "1", "2", "3"]


def complaint(grammar: Grammar) -> str:
    """What the real library has against it, nothing if it consents."""

    async def main() -> str:
        check = GrammarCheck(byte_grammars())
        try:
            await check.check_grammar(grammar, FIELD)
        except InvalidRequest as error:
            return f"{error.param}: {error}"
        return ""

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar(SCHEMA, "{"), "not valid JSON"),
        (Grammar(SCHEMA, "3"), "a schema is a JSON object, true or false"),
        (Grammar(SCHEMA, '{"type": "strin"}'), "Invalid type: strin"),
        (Grammar(SCHEMA, '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar(SCHEMA, '{"$ref": "http://example.org/x.json"}'), "example.org"),
        (Grammar(SCHEMA, '{"type": "string", "pattern": "("}'), "regex"),
        (Grammar(SCHEMA, "false"), "schema"),
        (Grammar(SCHEMA, '{"a": "' + "x" * 200_000 + '"}'), "at most 131072"),
        (Grammar(SCHEMA, '{"items": ' * 99 + "{}" + "}" * 99), "nested 100 deep"),
        (Grammar(REGEX, "a(?=b)"), "look-around"),
        (Grammar(REGEX, "(a"), "regex"),
        (Grammar(REGEX, "\ud800"), "not valid Unicode"),
        (Grammar(GrammarKind.CHOICE, "[]"), "at least one string"),
        (Grammar(GrammarKind.CHOICE, "[1]"), "at least one string"),
        (Grammar(GrammarKind.LARK, "start: what"), "unknown name"),
        (Grammar(GrammarKind.EBNF, "root ::= what"), "what"),
        (Grammar(GrammarKind.TAGS, "{}"), "triggers"),
    ],
)
def test_the_error_names_the_field_and_the_reason(grammar: Grammar, said: str) -> None:
    found = complaint(grammar)
    assert found.startswith(f"{FIELD}: Invalid '{FIELD}': ")
    assert said in found
    assert "\n" not in found


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.JSON_OBJECT),
        Grammar(SCHEMA, "true"),
        Grammar(SCHEMA, json.dumps({"type": "object", "properties": {"é": {"enum": [1, None]}}})),
        Grammar(SCHEMA, '{"$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}'),
        Grammar(REGEX, r"\d{3}-\w+"),
        Grammar(GrammarKind.CHOICE, '["a", "é\\n\\u0001", "\\"\\\\/"]'),
        Grammar(GrammarKind.LARK, 'start: "a" start "b" | "x"'),
        Grammar(GrammarKind.EBNF, 'root ::= "a" root "b" | "x"'),
    ],
    ids=lambda grammar: str(grammar.kind),
)
def test_supported_grammars_are_accepted(grammar: Grammar) -> None:
    assert complaint(grammar) == ""
