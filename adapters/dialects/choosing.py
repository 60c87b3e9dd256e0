"""Chooses a checkpoint's dialect, by name or from its chat template."""

from collections.abc import Mapping
from functools import partial
from typing import TypeVar

from adapters.dialects.calls import python_call
from adapters.dialects.calls.bare_call import BareCallMarks, make_bare_reader
from adapters.dialects.calls.bare_grammar import bare_structure
from adapters.dialects.calls.python_call import python_structure, read_python_calls
from adapters.dialects.calls.tool_calls import (
    GRANITE_CALLS,
    HERMES_CLOSE,
    HERMES_OPEN,
    MISTRAL_ARGS,
    MISTRAL_CALLS,
    MISTRAL_ID,
    PHI_CLOSE,
    PHI_OPEN,
    PYTHON_TAG,
    read_hermes,
    read_llama,
    read_marked_array,
    read_mistral,
)
from adapters.dialects.calls.xml_call import read_xml_calls, xml_structure
from adapters.dialects.dialect import ModelDialect, ToolStyle, short_id
from adapters.dialects.harmony import CALL_STYLE, CHANNEL, REASONING, HarmonyDialect
from adapters.dialects.message_tools import reads_tools_of_messages
from adapters.dialects.parser import ReasoningMarkers
from engine.errors import StartupError

T = TypeVar("T")
AUTO, NONE = "auto", "none"
_MISTRAL = (MISTRAL_CALLS, MISTRAL_ARGS, MISTRAL_ID)
GEMMA = BareCallMarks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = BareCallMarks("<|tool_call>", "<tool_call|>", '<|"|>')


def _bare_style(marks: BareCallMarks) -> ToolStyle:
    return ToolStyle(
        make_bare_reader(marks),
        mark=marks.open,
        special_tokens=tuple(marks),
        structure=partial(bare_structure, marks),
    )


TOOL_STYLES: Mapping[str, ToolStyle] = {
    "hermes": ToolStyle(
        read_hermes,
        mark=HERMES_OPEN,
        head='\n{"name": "%s", "arguments": ',
        tail="}\n" + HERMES_CLOSE,
        special_tokens=(HERMES_OPEN, HERMES_CLOSE),
    ),
    "llama3": ToolStyle(read_llama, key="parameters", special_tokens=(PYTHON_TAG,)),
    "mistral": ToolStyle(
        read_mistral,
        mark=MISTRAL_CALLS,
        head='[{"name": "%s", "arguments": ',
        tail="}]",
        special_tokens=_MISTRAL,
        new_id=short_id,
    ),
    "harmony": CALL_STYLE,
    "mistral-args": ToolStyle(  # since 2025; one parser reads both forms
        read_mistral,
        mark=MISTRAL_CALLS,
        head="%s" + MISTRAL_ARGS,
        special_tokens=_MISTRAL,
        new_id=short_id,
    ),
    "granite": ToolStyle(
        read_marked_array,
        mark=GRANITE_CALLS,
        head='[{"name": "%s", "arguments": ',
        tail="}]",
        special_tokens=(GRANITE_CALLS,),
    ),
    "phi4": ToolStyle(
        read_marked_array,
        mark=PHI_OPEN,
        head='[{"name": "%s", "arguments": ',
        tail="}]" + PHI_CLOSE,
        special_tokens=(PHI_OPEN, PHI_CLOSE),
    ),
    "gemma": _bare_style(GEMMA),  # FunctionGemma
    "gemma4": _bare_style(GEMMA_4),
    "qwen-xml": ToolStyle(  # Qwen3.5 and Qwen3-Coder
        read_xml_calls,
        mark=HERMES_OPEN,
        special_tokens=(HERMES_OPEN, HERMES_CLOSE),
        structure=xml_structure,
    ),
    "olmo3": ToolStyle(
        read_python_calls,
        mark=python_call.OPEN,
        special_tokens=(python_call.OPEN, python_call.CLOSE),
        structure=python_structure,
    ),
}
REASONING_MARKS: Mapping[str, ReasoningMarkers] = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "harmony": REASONING,
    "gemma4": ReasoningMarkers("<|channel>", "<channel|>", label="thought"),
}


def choose_dialect(template: str, tools: str = AUTO, reasoning: str = AUTO) -> ModelDialect:
    """The dialect of a model whose chat template is `template` ("" if it has none).

    Raises `StartupError` for a name that is neither "auto", "none" nor in the tables.
    """
    if tools == AUTO:
        tools = _tools_of(template)
    if reasoning == AUTO:
        reasoning = _reasoning_of(template)
    kind = HarmonyDialect if "harmony" in (tools, reasoning) else ModelDialect
    return kind(
        tools=_named(tools, TOOL_STYLES, "--tool-dialect"),
        reasoning=_named(reasoning, REASONING_MARKS, "--reasoning-dialect"),
    )


def _tools_of(template: str) -> str:
    if "tools" not in template:
        return NONE
    if CHANNEL in template:
        return "harmony"
    if MISTRAL_CALLS in template:
        return "mistral-args" if MISTRAL_ARGS in template else "mistral"
    if reads_tools_of_messages(template) and "<|/tool|>" in template:
        return "phi4"
    if GEMMA.open in template:
        return "gemma"
    if GEMMA_4.open in template:
        return "gemma4"
    if python_call.OPEN in template:
        return "olmo3"
    if GRANITE_CALLS in template:
        return "granite"
    if HERMES_OPEN in template:
        return "qwen-xml" if "<function=" in template else "hermes"
    return "llama3" if PYTHON_TAG in template or "<|eom_id|>" in template else NONE


def _reasoning_of(template: str) -> str:
    if "[THINK]" in template:
        return "mistral"
    if CHANNEL in template:
        return "harmony"
    if "<|channel>thought" in template:
        return "gemma4"
    return "think" if "<think>" in template or "</think>" in template else NONE


def _named(name: str, table: Mapping[str, T], flag: str) -> T | None:
    if name == NONE:
        return None
    if name not in table:
        allowed = ", ".join((AUTO, NONE, *table))
        raise StartupError(f"{flag} must be one of {allowed}, not {name!r}")
    return table[name]
