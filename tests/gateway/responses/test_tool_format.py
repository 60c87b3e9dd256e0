import json
import re
from typing import Any

import pytest

from engine.errors import InvalidRequest
from gateway.schema.responses.tool_format import MAX_PATTERN, input_pattern
from tests.gateway.generation.test_output_limits import accepts
from tests.gateway.responses.asking import HERMES
from tests.gateway.responses.test_response_tools import call, posted
from tests.gateway.rig import Rig, Setting, played
from tests.gateway.scripted_model import byte_grammars

# The format of Codex CLI's tool `apply_patch`.
APPLY_PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
GOOD_PATCH = '*** Begin Patch\n*** Add File: a "b".txt\n+one\n+\\é\n*** End Patch\n'
TERMS = """
?start: term (" + " term)*   // a comment
term.2: NUMBER
      | "(" [sign] /[a-z]\\/x/i ")"
      | "a".."c" ~ 2..3
!sign: "-"
%import common (NUMBER, LETTER)
"""


def lark(definition: str) -> dict[str, Any]:
    return {"type": "grammar", "syntax": "lark", "definition": definition}


def regex(definition: str) -> dict[str, Any]:
    return {"type": "grammar", "syntax": "regex", "definition": definition}


@pytest.mark.parametrize(
    ("form", "text", "matches"),
    [
        (lark(APPLY_PATCH), GOOD_PATCH, True),
        (lark(APPLY_PATCH), GOOD_PATCH.replace("+one", "one"), False),
        (lark(APPLY_PATCH), GOOD_PATCH + "more", False),
        (lark(APPLY_PATCH), "*** Begin Patch\n*** End Patch", False),
        (lark(TERMS), "1.5 + (Q/X) + abc", True),
        (lark(TERMS), "(-q/x)", True),
        (lark(TERMS), "abcc", False),
        (lark(TERMS), "1.5+2", False),
        (lark('start: "a" | "B"i\n  | (\n "c" "d"\n )'), "b", True),
        (lark('start: "a" | "B"i\n  | (\n "c" "d"\n )'), "cd", True),
        (lark("start: /a//b+/"), "/b", False),
        (regex("^[0-9]{3}$"), "123", True),
        (regex("a|bc"), "abc", False),
        (regex(r"a\$"), "a$", True),
    ],
)
def test_an_input_matches_if_the_grammar_accepts_it(
    form: dict[str, Any], text: str, matches: bool
) -> None:
    pattern = input_pattern(form)
    assert pattern is not None
    assert bool(re.fullmatch(pattern, text)) == matches


@pytest.mark.parametrize(
    ("form", "error"),
    [
        (lark('start: "(" start ")" | "x"'), "rule 'start' uses itself"),
        (lark("start: missing"), "'missing' is not defined"),
        (lark('begin: "x"'), "'start' is not defined"),
        (lark('start: "x"\n%ignore " "'), "'%ignore"),
        (lark('start: ("x"'), "'(' is not closed"),
        (lark('start: "x" ;'), "unexpected ';"),
        (lark("start: /x/q"), "unknown flags 'q'"),
        (lark("start x"), "expected 'name: definition'"),
        ({"type": "grammar", "syntax": "gbnf", "definition": ""}, "'lark', 'regex'"),
        ({"type": "grammar", "syntax": "lark"}, "format.definition"),
        ({"type": "json"}, "'text', 'grammar'"),
    ],
)
def test_a_format_that_cannot_be_constrained_is_an_error(form: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(error)):
        input_pattern(form)


def test_definitions_that_double_each_other_are_bounded() -> None:
    rules = "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60))
    with pytest.raises(InvalidRequest, match=f"more than {MAX_PATTERN} characters"):
        input_pattern(lark(f'start: r0\n{rules}\nr60: "x"'))


@pytest.mark.parametrize("form", [None, {"type": "text"}])
def test_text_is_not_constrained(form: dict[str, Any] | None) -> None:
    assert input_pattern(form) is None


@pytest.mark.parametrize(
    ("patch", "is_allowed"), [(GOOD_PATCH, True), (GOOD_PATCH.replace("+one", "one"), False)]
)
@played(Setting(texts=("Hello!",), dialect=HERMES))
async def test_calls_of_a_custom_tool_are_constrained_to_its_grammar(
    rig: Rig, patch: str, is_allowed: bool
) -> None:
    tool = {"type": "custom", "name": "apply_patch", "format": lark(APPLY_PATCH)}
    status, body, _ = await posted(rig, tools=[tool])
    assert status == 200, body
    (request,) = rig.ended
    assert request.spec.grammar is not None
    matcher = byte_grammars().compile(request.spec.grammar)
    output = call("apply_patch", {"input": "@"})
    output = output.replace('"@"', json.dumps(patch, ensure_ascii=False))
    assert accepts(matcher, output) == is_allowed


@played(Setting(dialect=HERMES))
async def test_the_error_names_the_field_of_the_tool(rig: Rig) -> None:
    tool = {"type": "custom", "name": "f", "format": lark('start: start "x"')}
    group = {"type": "namespace", "name": "g", "tools": [tool]}
    for tools, path in (([tool], "tools[0]"), ([group], "tools[0].tools[0]")):
        status, body, _ = await posted(rig, tools=tools)
        assert (status, body["error"]["param"]) == (400, f"{path}.format.definition")
        assert "uses itself" in body["error"]["message"]
