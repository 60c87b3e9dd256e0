"""One grammar for tool calls and output formats together."""

import json
from dataclasses import replace

from engine.errors import InvalidRequest
from engine.step import Grammar, GrammarKind, SamplingParams
from gateway.access.grammar_check import MAX_BYTES, schema_error
from gateway.groups.group import ServedModel
from gateway.ports import Dialect, ToolCallGrammar
from gateway.schema.decoding import invalid
from gateway.schema.fields.generation import OutputConstraint
from gateway.schema.openai.tools import ToolPlan

BANNED = -100.0  # added to a logit: the token is sampled only if nothing else is left


def tool_constraint(
    tools: ToolPlan, requested: OutputConstraint | None, dialect: Dialect | None
) -> OutputConstraint | None:
    """What outputs must match if tools are offered: forced and strict calls, or a format.

    Where tools may be called and JSON is requested, an output is a call or the JSON. Raises
    `InvalidRequest` if the model cannot call tools, or if both cannot be one grammar.
    """
    if dialect is None or not dialect.has_tool_calls:
        raise InvalidRequest(
            f"'{tools.param}' is not supported: this model's chat template has no tool calls that "
            "the server can parse. (Their format can be set with --tool-dialect.)",
            tools.param,
        )
    if not tools.is_constrained and requested is None:
        return None
    if tools.must_call:
        requested = None  # every output is a call
    calls = ToolCallGrammar(tools.argument_schemas(), tools.must_call, tools.max_calls)
    if requested is not None:
        calls = calls._replace(answer=_json_schema(requested, tools.param))
    grammar = dialect.call_grammar(calls)
    if grammar is None:
        return None
    param = tools.param if requested is None else requested.param
    if len(grammar.text) <= MAX_BYTES:
        _check_schemas(tools, calls, param)
    return OutputConstraint(grammar, param)


def _check_schemas(tools: ToolPlan, calls: ToolCallGrammar, answer_param: str) -> None:
    schemas = {answer_param: calls.answer}
    inner = ".function" if tools.param == "tools" else ""
    for index, function in enumerate(tools.listed):
        path = f"{tools.param}[{index}]{inner}.parameters"
        schemas[path] = calls.tools.get(function.name)
    for path, schema in schemas.items():
        if (reason := schema_error(schema)) is not None:
            raise invalid(path, f"{reason}.")


def without_calls(sampling: SamplingParams, model: ServedModel) -> SamplingParams:
    """Sampling that begins no call of a tool that the prompt lists, if calls begin with a token of
    their own. Unlike a grammar it leaves the model its reasoning."""
    mark = "" if model.dialect is None else model.dialect.call_mark
    ids = model.tokenizer.encode(mark, add_special_tokens=False) if mark else []
    if len(ids) != 1:
        return sampling
    others = [bias for bias in sampling.logit_bias if bias[0] != ids[0]]
    return replace(sampling, logit_bias=(*others, (ids[0], BANNED)))


def _json_schema(requested: OutputConstraint, tools_param: str) -> dict[str, object]:
    grammar: Grammar = requested.grammar
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return {"type": "object"}
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        try:
            schema = json.loads(grammar.text)
        except ValueError as error:
            raise invalid(requested.param, f"it is not valid JSON ({error}).") from error
        if isinstance(schema, dict):
            return schema
    raise InvalidRequest(
        f"'{requested.param}' cannot be combined with '{tools_param}'; a JSON schema can.",
        requested.param,
    )
