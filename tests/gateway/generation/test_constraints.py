"""Grammars that fail only once outputs are sampled."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from engine.step import Fault, Step, StepResult
from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, MODEL, USER
from tests.gateway.scripted_model import ScoringExecutor

TEXT_FORMAT = {"type": "json_schema", "name": "s", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": USER, "guided_regex": "[a-z]+"}, "guided_regex"),
        (CHAT, {"messages": USER, "guided_regex": "[a-z]+", "n": 2}, "guided_regex"),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": TEXT_FORMAT}},
            "text.format.schema",
        ),
        (CHAT, {"messages": USER}, None),
    ],
)
def test_the_error_of_an_output_that_its_grammar_ends_names_the_field(
    path: str, fields: dict[str, Any], param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = ScoringExecutor.submit

    def failing(executor: ScoringExecutor, step: Step) -> "asyncio.Future[StepResult]":
        faults = tuple(Fault(at, "grammar: too large", True) for at in range(len(step.entries)))
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        submit(executor, step).add_done_callback(
            lambda done: future.set_result(replace(done.result(), faults=faults))
        )
        return future

    monkeypatch.setattr(ScoringExecutor, "submit", failing)
    answer = answer_to(path, {"model": MODEL, **fields})
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "nothing_allowed", param)
    assert error["message"] == (f"Invalid '{param}': " if param else "") + "grammar: too large"
