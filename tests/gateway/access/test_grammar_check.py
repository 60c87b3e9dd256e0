import asyncio
import json
from typing import Any

import pytest

from engine.errors import InvalidRequest, Overloaded, Unavailable
from engine.step import Grammar, GrammarKind
from gateway.access.callers import Caller
from gateway.access.grammar_check import MAX_OPTIONAL, SEATS, GrammarCheck, GrammarLimits
from gateway.access.key_file import Key
from tests.gateway.scripted_model import CheckedOnLoop

REGEX = GrammarKind.REGEX
SCHEMA = GrammarKind.JSON_SCHEMA
FIELD = "response_format.json_schema.schema"


class FakeChecker:
    """Does what the grammar's text says, and keeps what it was asked to check."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.tried: list[str] = []  # for too short a time
        self.gate = asyncio.Event()

    async def check(self, grammar: Grammar, seconds: float | None = None) -> str | None:
        if grammar.text.startswith("slow") and seconds is not None:
            self.tried.append(grammar.text)
            raise TimeoutError
        self.checked.append(grammar.text)
        if grammar.text.startswith("slow"):
            await self.gate.wait()
        if grammar.text == "lost":
            raise Unavailable("the process was lost")
        return "no such thing" if grammar.text == "bad" else None

    async def close(self) -> None: ...


def optional(num: int, **others: object) -> dict[str, Any]:
    """A schema of an object with so many properties that are not required."""
    properties = {f"p{number}": {"type": "string"} for number in range(num)}
    return {"type": "object", "properties": properties, **others}


TOO_MANY = optional(MAX_OPTIONAL + 1)


def schema(found: object) -> Grammar:
    return Grammar(SCHEMA, json.dumps(found))


def checked(text: str) -> Grammar:
    return Grammar(REGEX, text)


async def test_a_good_grammar_is_checked_once() -> None:
    check = GrammarCheck(checker := FakeChecker())
    await asyncio.gather(*(check.check_grammar(checked("good"), "regex") for _ in range(3)))
    await check.check_grammar(checked("good"), "regex", "other tenant")
    assert checker.checked == ["good"]


async def test_an_invalid_grammar_is_rejected_each_time_and_checked_once() -> None:
    check = GrammarCheck(checker := FakeChecker())
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"^Invalid 'regex': no such thing\.$") as caught:
            await check.check_grammar(checked("bad"), "regex")
        assert caught.value.param == "regex"
    assert checker.checked == ["bad"]


async def test_the_oldest_results_are_evicted() -> None:
    check = GrammarCheck(checker := FakeChecker(), GrammarLimits(max_remembered=2))
    texts = ["1", "2", "3"]
    for text in (*texts, *texts[1:], *texts):
        await check.check_grammar(checked(text), "regex")
    assert checker.checked == [*texts, "1", "2", "3"]


async def test_an_error_of_the_checker_is_not_cached() -> None:
    check = GrammarCheck(checker := FakeChecker())
    for _ in range(2):
        with pytest.raises(Unavailable):
            await check.check_grammar(checked("lost"), "regex")
    assert checker.checked == ["lost", "lost"]


async def test_a_tenant_compiles_one_grammar_at_a_time_and_others_are_not_delayed() -> None:
    check = GrammarCheck(checker := FakeChecker())
    slow = [
        asyncio.create_task(check.check_grammar(checked(f"slow {number}"), "regex", "a"))
        for number in range(5)
    ]
    for _ in range(3):  # the first one takes a seat
        await asyncio.sleep(0)
    await check.check_grammar(checked("good"), "regex", "b")
    assert checker.checked == ["slow 0", "good"]
    checker.gate.set()
    await asyncio.gather(*slow)
    assert len(checker.checked) == 6


async def test_waiting_for_a_seat_is_limited_and_the_seat_is_free_afterwards() -> None:
    check = GrammarCheck(checker := FakeChecker(), GrammarLimits(wait_seconds=0.02))
    holding = [
        asyncio.create_task(check.check_grammar(checked(f"slow {tenant}"), "regex", tenant))
        for tenant in ("a", "b")
    ]
    for _ in range(3):  # the tasks take both seats
        await asyncio.sleep(0)
    assert checker.checked == ["slow a", "slow b"]
    for tenant in ("a", "b", "c"):
        with pytest.raises(Overloaded, match="Too many grammars") as caught:
            await check.check_grammar(checked(f"slow {tenant} again"), "regex", tenant)
        assert caught.value.retry_after == 0.02
    await check.check_grammar(checked("quick"), "regex", "c")
    checker.gate.set()
    await asyncio.gather(*holding)
    for tenant in ("a", "b", "c"):
        await check.check_grammar(checked(f"good {tenant}"), "regex", tenant)


async def test_quick_grammars_do_not_wait_for_slow_ones_of_any_number_of_tenants() -> None:
    check = GrammarCheck(checker := FakeChecker())
    slow = [
        asyncio.create_task(check.check_grammar(checked(f"slow {tenant}"), "regex", str(tenant)))
        for tenant in range(8)
    ]
    for _ in range(30):
        await asyncio.sleep(0)
    assert len(checker.tried) == 8
    assert len(checker.checked) == SEATS
    await check.check_grammar(checked("good"), "regex", "b")
    assert checker.checked[SEATS:] == ["good"]
    checker.gate.set()
    await asyncio.gather(*slow)


def complaint(grammar: Grammar) -> str:
    """The real library's error; empty if it accepts the grammar."""

    async def main() -> str:
        check = GrammarCheck(CheckedOnLoop())
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
        (Grammar(SCHEMA, "3"), "a schema must be a JSON object, true or false"),
        (Grammar(SCHEMA, '{"type": "strin"}'), "Invalid type: strin"),
        (Grammar(SCHEMA, '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar(SCHEMA, '{"$ref": "http://example.org/x.json"}'), "example.org"),
        (Grammar(SCHEMA, '{"type": "string", "pattern": "("}'), "regex"),
        (Grammar(SCHEMA, "false"), "schema"),
        (Grammar(SCHEMA, '{"allOf": [{"$ref": "#"}]}'), "a $ref or a rule leads only back to"),
        (Grammar(GrammarKind.LARK, "start: a\na: a a"), "a $ref or a rule leads only back to"),
        (Grammar(SCHEMA, '{"a": "' + "x" * 200_000 + '"}'), "at most 131072"),
        (Grammar(SCHEMA, '{"items": ' * 99 + "{}" + "}" * 99), "nested 100 deep"),
        (Grammar(REGEX, "a(?=b)"), "look-around"),
        (Grammar(REGEX, "(a"), "regex"),
        (Grammar(REGEX, "\ud800"), "not valid Unicode"),
        (Grammar(REGEX, "a{1000000}"), "too many expressions"),
        (Grammar(GrammarKind.LARK, 'start: "a"{1000000}'), "Too many items"),
        (Grammar(GrammarKind.EBNF, 'root ::= "a"{1000000}'), "Too many items"),
        (schema({"allOf": [optional(MAX_OPTIONAL + 100)]}), "Current row"),
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
    "found",
    [
        TOO_MANY,
        {"items": TOO_MANY},
        {"additionalProperties": {"properties": {"a": TOO_MANY}}},
        optional(MAX_OPTIONAL + 3, required=["p1"]),
        optional(MAX_OPTIONAL + 2, required=[f"p{MAX_OPTIONAL + 1}"]),
    ],
)
async def test_a_schema_with_too_many_optional_properties_is_not_compiled(found: object) -> None:
    check = GrammarCheck(checker := FakeChecker())
    with pytest.raises(InvalidRequest, match=f"{MAX_OPTIONAL + 1} properties in succession"):
        await check.check_grammar(schema(found), FIELD)
    assert not checker.checked


@pytest.mark.parametrize(
    "grammar",
    [
        schema(optional(MAX_OPTIONAL)),
        schema(optional(2 * MAX_OPTIONAL, required=[f"p{MAX_OPTIONAL}"])),
        schema({"allOf": [TOO_MANY, {"required": ["p9"]}]}),
        schema({"properties": {**dict.fromkeys(TOO_MANY["properties"], False), "q": {}}}),
        schema({**TOO_MANY, "type": "string"}),
        schema({**TOO_MANY, "const": {}}),
        Grammar(REGEX, "[a-z]{300000}"),
        Grammar(REGEX, "a?"),
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


def test_callers_of_a_server_without_keys_take_turns_by_their_addresses() -> None:
    assert Caller("r", 0.0, network="192.0.2.1").client == "192.0.2.1"
    assert Caller("r", 0.0, key=Key("alice", ()), network="192.0.2.1").client == "alice"
