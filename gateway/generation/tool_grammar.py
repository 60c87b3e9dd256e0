"""Tools and formats together: the one grammar that an answer is held to."""

import json
from typing import TYPE_CHECKING

from engine.errors import InvalidRequest
from engine.step import Grammar, GrammarKind
from gateway.ports import ToolCallGrammar
from gateway.schema.fields.output import OutputConstraint

if TYPE_CHECKING:
    from gateway.ports import Dialect
    from gateway.schema.openai.tools import ToolPlan


def tool_constraint(
    plan: "ToolPlan", asked: OutputConstraint | None, dialect: "Dialect | None"
) -> OutputConstraint | None:
    """What answers must match, if anything: forced and strict calls, or the format `asked` for.

    Where tools may be called and JSON is asked for, an answer is one or the other. Raises
    `InvalidRequest` if the model cannot call, or cannot be held to both.
    """
    if not plan.offered:
        return asked
    if dialect is None or not dialect.reads_calls:
        raise InvalidRequest(
            f"'{plan.param}' is not supported: this model's chat template shows no way to call "
            "tools. (The server can be told of one with --tool-dialect.)",
            plan.param,
        )
    if not plan.is_constrained and asked is None:
        return None
    if plan.must_call:
        asked = None  # no answer but a call will come
    held = ToolCallGrammar(plan.argument_schemas(), plan.must_call, plan.max_calls)
    if asked is not None:
        held = held._replace(answer=_schema_of(asked, plan.param))
    grammar = dialect.hold_calls(held)
    return (
        None
        if grammar is None
        else OutputConstraint(grammar, plan.param if asked is None else asked.param)
    )


def _schema_of(asked: OutputConstraint, param: str) -> dict[str, object]:
    grammar: Grammar = asked.grammar
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return {"type": "object"}
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        try:
            schema = json.loads(grammar.text)
        except ValueError as error:
            message = f"Invalid '{asked.param}': it is not valid JSON ({error})."
            raise InvalidRequest(message, asked.param) from error
        if isinstance(schema, dict):
            return schema
    raise InvalidRequest(
        f"'{asked.param}' cannot be combined with '{param}'; a JSON schema can.", asked.param
    )
