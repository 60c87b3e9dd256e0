"""`/v1/decisions` and `/v1/systemone`: forms of input and questions, answers, tokens and errors.

In the rig a token is a byte whose log-probability is its number, negative, in hundredths; labels of
several bytes are scored as continuations. An iteration takes `STEP` seconds.
"""

import asyncio
from dataclasses import replace
from math import exp
from typing import Any

import pytest
from openai.types import Decision

from engine.pooling import PoolingReport
from engine.step import Fault, Step, StepResult
from tests.gateway.answers import answer_to
from tests.gateway.rig import CONTEXT, MODEL, STEP, Rig, Setting, played
from tests.gateway.scripted_model import END, ScoringExecutor

PATH, SYSTEM_ONE = "/v1/decisions", "/v1/systemone"
LONG = Setting(context=4_000, num_blocks=100_000, max_batch_size=64)
TRUE = {"type": "predicate", "instructions": "It is so."}
PICK = {
    "type": "choice",
    "name": "pick",
    "instructions": "Which?",
    "choices": [{"value": "x", "description": "the first"}, {"value": True}, {"value": "true"}],
}
RATE = {
    "type": "score",
    "instructions": [{"type": "input_text", "text": "How much?"}],
    "levels": [{"label": "none"}, {"label": "much", "description": "a lot"}],
}
USER = {"role": "user", "content": "hi"}


def asked(path: str = PATH, setting: Setting = LONG, **fields: Any) -> tuple[int, Any, Rig]:
    """Status, JSON and rig of one request; `model` is the rig's."""
    found = answer_to(path, {"model": MODEL, **fields}, setting)
    if (path, found.status) == (PATH, 200):
        Decision.model_validate(found.json)  # as the official client reads it
    return found.status, found.json, found.rig


def decide(*questions: Any, given: Any = "hi", setting: Setting = LONG) -> tuple[int, Any, Rig]:
    return asked(PATH, setting, input=given, questions=list(questions))


def prompts(rig: Rig) -> list[str]:
    return [bytes(request.spec.prompt).decode() for request in rig.ended]


def shares(*scores: float) -> list[float]:
    """Probabilities of options with these log-probabilities."""
    weights = [exp(score) for score in scores]
    return [weight / sum(weights) for weight in weights]


def test_a_predicate_has_the_probability_of_yes() -> None:
    status, body, rig = decide(TRUE)
    assert status == 200
    yes, no = -sum(b"Yes") / 100, -sum(b"No") / 100
    (answer,) = body["answers"]
    assert answer["probability"] == pytest.approx(shares(yes, no)[0])
    assert answer["label_mass"] == pytest.approx(exp(yes) + exp(no))
    assert (answer["type"], answer["name"], body["model"]) == ("predicate", None, MODEL)
    shared, *others = prompts(rig)
    assert shared == "user:hi\n\n"
    tail = "Is this statement true? It is so.\nAnswer with Yes or No only.\n"
    assert sorted(others) == [shared + tail + path for path in ("", "N", "Y", "Ye")]


def test_a_choice_has_typed_values_and_a_confidence() -> None:
    _, body, rig = decide(PICK)
    (answer,) = body["answers"]
    expected = shares(-0.65, -0.66, -0.67)
    assert [row["value"] for row in answer["probabilities"]] == ["x", True, "true"]
    found = [row["probability"] for row in answer["probabilities"]]
    assert found == pytest.approx(expected, rel=1e-5)
    assert (answer["choice"], answer["name"]) == ("x", "pick")
    assert answer["confidence"] == pytest.approx((3 * expected[0] - 1) / 2, rel=1e-3)
    assert "Question: Which?\nA. x: the first\nB. true\nC. true\nAnswer" in prompts(rig)[-1]


def test_a_score_is_the_mean_level() -> None:
    _, body, rig = decide(RATE)
    (answer,) = body["answers"]
    expected = shares(-0.48, -0.49)
    assert answer["score"] == pytest.approx(expected[1], rel=1e-5)
    assert [row["label"] for row in answer["probabilities"]] == ["none", "much"]
    assert [row["value"] for row in answer["probabilities"]] == [0, 1]
    assert "Question: How much?\n0. none\n1. much: a lot\nAnswer" in prompts(rig)[-1]


def test_many_options_have_labels_of_two_letters() -> None:
    choices = [{"value": f"option {n}"} for n in range(255)]
    _, body, rig = decide({"type": "choice", "instructions": "Which?", "choices": choices})
    (answer,) = body["answers"]
    probabilities = [row["probability"] for row in answer["probabilities"]]
    assert sum(probabilities) == pytest.approx(1)
    assert answer["choice"] == "option 0"
    assert probabilities[27] == pytest.approx(probabilities[2])  # BB and AC
    assert len(rig.ended) == 2 + 10  # the input, the root, and labels from A to J


@played(LONG)
async def test_all_questions_share_the_input_and_an_iteration(rig: Rig) -> None:
    given = "word " * 300
    questions = [{**PICK, "instructions": f"{n:02}?"} for n in range(60)]
    fields = {"model": MODEL, "input": given, "questions": questions}
    body = (await rig.client.post(PATH, fields)).json
    usage = body["usage"]
    shared, tail = len(f"user:{given}\n\n"), len(rig.ended[-1].spec.prompt)
    assert usage["input_tokens"] == shared + 60 * (tail - shared)
    assert usage["total_tokens"] == usage["input_tokens"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    assert usage["output_tokens"] == 0
    computed = sum(request.prompt_len - request.num_cached for request in rig.ended)
    assert computed == usage["input_tokens"] - cached
    assert rig.metrics.num_prompt_tokens == usage["input_tokens"]
    most = rig.engine.scheduler.settings.max_batch_tokens
    num_iterations = -(-shared // most) + -(-60 * (tail - shared) // most)
    assert rig.metrics.num_iterations <= num_iterations
    again = (await rig.client.post(PATH, fields)).json
    assert again["answers"] == body["answers"]
    details = again["usage"]["input_tokens_details"]  # a token of each request is computed again
    assert details["cached_tokens"] == usage["input_tokens"] - 61
    assert details["cache_write_tokens"] == 61


def test_more_questions_than_seats_and_memory_take_turns() -> None:
    small = Setting(context=400, num_blocks=500, max_batch_size=4, max_queue_requests=9)
    status, body, _ = decide(*[PICK, TRUE] * 200, setting=small)
    assert (status, len(body["answers"])) == (200, 400)


def test_an_input_may_be_messages_calls_and_json() -> None:
    items = [
        {"role": "developer", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": [1, None]}}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    status, _, rig = decide(PICK, given=items)
    assert status == 200
    assert (
        prompts(rig)[0] == 'developer:Be strict.\nuser:{"a":[1,null]}\nassistant:\ntool:done\nuser:'
    )


def test_parts_with_breakpoints_are_the_same_text() -> None:
    mark = {"mode": "explicit"}
    parts = [
        {"type": "input_text", "text": "one, ", "prompt_cache_breakpoint": mark},
        {"type": "input_text", "text": "two"},
    ]
    for role in ("user", "system"):
        plain = decide(PICK, given=[{"role": role, "content": "one, two"}])[2]
        marked = decide(PICK, given=[{"role": role, "content": parts}])[2]
        assert prompts(marked) == prompts(plain)


def test_system_one_has_states_and_named_questions() -> None:
    status, body, rig = asked(
        SYSTEM_ONE,
        state={"text": "hi"},
        questions={
            "so": {"type": "noul", "instructions": "It is so.", "criteria": {"true": "for sure"}},
            "pick": {"type": "choice", "criteria": {"x": "the first", "y": None}},
            "rate": {"type": "score", "instructions": "How much?", "criteria": ["none", "much"]},
        },
    )
    assert status == 200
    so, pick, rate = (body["answers"][name] for name in ("so", "pick", "rate"))
    assert set(so) == {"type", "noul", "x_label_mass"}
    assert (pick["choice"], list(pick["probabilities"])) == ("x", ["x", "y"])
    assert rate["legend"] == {"0": "none", "1": "much"}
    assert rate["score"] == pytest.approx(rate["probabilities"]["1"])
    assert body["usage"]["output_tokens"] == 0
    tails = prompts(rig)[1:]
    assert prompts(rig)[0] == 'user:{"text":"hi"}\n\n'
    assert any("Yes. for sure\n" in tail for tail in tails)
    assert any("A. x: the first\nB. y\n" in tail for tail in tails)


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"input": " "}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]},
         "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_json", "data": 1}]}]},
         "input[0].content[0].data"),
        ({"questions": []}, "questions"),
        ({"questions": [TRUE] * 401}, "questions"),
        ({"questions": [{**TRUE, "type": "noul"}]}, "questions[0].type"),
        ({"questions": [{**TRUE, "instructions": " "}]}, "questions[0].instructions"),
        ({"questions": [{**TRUE, "levels": []}]}, "questions[0].levels"),
        ({"questions": [TRUE, {**PICK, "choices": [{"value": "x"}]}]}, "questions[1].choices"),
        ({"questions": [{**PICK, "choices": [{"value": n} for n in ("x", "y", "x")]}]},
         "questions[0].choices"),
        ({"questions": [{**PICK, "choices": [{"value": 3}, {"value": "x"}]}]},
         "questions[0].choices[0].value"),
        ({"questions": [{**RATE, "levels": [{"label": str(n)} for n in range(11)]}]},
         "questions[0].levels"),
        ({"questions": [TRUE, {**TRUE, "instructions": "long " * 900}]}, "questions[1]"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_rejected(changed: dict[str, Any], param: str) -> None:
    status, body, _ = asked(PATH, LONG, **{"input": "hi", "questions": [TRUE], **changed})
    assert (status, body["error"]["param"]) == (400, param), body


def test_json_has_bounds() -> None:
    deep: Any = {}
    for _ in range(32):
        deep = {"a": deep}
    for data in (deep, [[0] * 10_000], ["x" * (257 << 10)]):
        status, body, _ = asked(SYSTEM_ONE, LONG, state=data, questions={"q": {"type": "noul"}})
        assert (status, body["error"]["param"]) == (400, "state")


def test_a_model_that_pools_decides_nothing() -> None:
    embeds = Setting(pooling=PoolingReport("embed", "last", 4))
    status, body, _ = decide(TRUE, setting=embeds)
    assert status == 400
    assert "does not generate text" in body["error"]["message"]


def test_a_question_whose_logits_are_not_finite_is_refused_and_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit = ScoringExecutor.submit

    def damaged(executor: ScoringExecutor, step: Step) -> "asyncio.Future[StepResult]":
        """No row of the first question has a result."""
        bad = tuple(
            Fault(number, "its logits are not finite")
            for number, entry in enumerate(step.entries)
            if b"Is this" in bytes(entry.tokens)
        )
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        submit(executor, step).add_done_callback(
            lambda done: future.set_result(replace(done.result(), faults=bad))
        )
        return future

    monkeypatch.setattr(ScoringExecutor, "submit", damaged)
    status, body, _ = decide(TRUE, PICK)
    assert status == 200
    refused, answered = body["answers"]
    assert refused == {"type": "refusal", "name": None}
    assert (answered["type"], answered["choice"]) == ("choice", "x")


@played(Setting(context=CONTEXT, max_batch_size=4))
async def test_questions_end_with_their_client(rig: Rig) -> None:
    fields = {"model": MODEL, "input": "hi", "questions": [PICK] * 300}
    async with rig.client.post(PATH, fields):
        await asyncio.sleep(2.5 * STEP)
    await asyncio.sleep(2 * STEP)
    assert not rig.engine.scheduler.pool
    assert rig.metrics.requests.outcomes["cancelled"] > 0
    assert END not in rig.ended[0].spec.prompt
