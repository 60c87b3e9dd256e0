"""From a decision request to its plan, and from its input and questions to token ids.

The question is the end of the last message. Everything before it is the same for all questions: it
is tokenized and computed once, and each question's tokens follow it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import orjson

from engine.errors import InvalidRequest
from engine.lora import LoraAdapter
from gateway.access.callers import Caller
from gateway.generation.conversation import render_text
from gateway.generation.prompt import Prompt, fits_on_loop, token_ids
from gateway.generation.threads import run_in_thread
from gateway.pooling.scores import Node, labels_of, tree_of
from gateway.ports import Tokenizer
from gateway.schema.decisions.openai import DecisionRequest, decode_decision, render_decision
from gateway.schema.decisions.question import Answer, Question
from gateway.schema.decisions.systemone import SystemOneRequest, decode_systemone, render_systemone
from gateway.schema.fields.sampling import SchedulingParams
from gateway.schema.openai.chat import chat_of
from gateway.schema.rendering import Usage
from gateway.service import Service

Render = Callable[[str, Sequence[Question], Sequence[Answer | None], Usage], bytes]

GAP = "\n\n"  # between the input and the question
NO_REASONING = {"enable_thinking": False, "thinking": False}


@dataclass(frozen=True, slots=True)
class DecisionPlan:
    """The questions of one HTTP request about one input: a text, or chat messages."""

    caller: Caller
    model: str
    input: str | Sequence[Mapping[str, Any]]
    questions: Sequence[Question]
    render: Render
    scheduling: SchedulingParams
    lora: LoraAdapter | None = None  # None: the base model


class TokenizedQuestion(NamedTuple):
    """A question's tokens behind the input, and those of its labels."""

    tail: Prompt
    labels: Sequence[Prompt]
    nodes: Sequence[Node]


class TokenizedDecision(NamedTuple):
    """The tokens that all questions have in common, and each question's own."""

    shared: Prompt
    questions: Sequence[TokenizedQuestion]


def plan_decision(body: bytes, caller: Caller, service: Service) -> DecisionPlan:
    """The plan of a `/v1/decisions` request; raises `InvalidRequest`, or `UnsupportedByModel` if
    the model does not generate text."""
    request = decode_decision(body, caller.unknown_fields)
    return _plan(request, render_decision, caller, service)


def plan_systemone(body: bytes, caller: Caller, service: Service) -> DecisionPlan:
    """The plan of a `/v1/systemone` request; raises as `plan_decision` does."""
    request = decode_systemone(body, caller.unknown_fields)
    return _plan(request, render_systemone, caller, service)


def _plan(
    request: DecisionRequest | SystemOneRequest, render: Render, caller: Caller, service: Service
) -> DecisionPlan:
    service.check_generates(request.model)
    return DecisionPlan(
        caller=caller,
        model=request.model,
        input=request.read_input(),
        questions=request.read_questions(),
        render=render,
        scheduling=request.scheduling_params,
        lora=service.lora_of(request.model),
    )


async def tokenize_decision(plan: DecisionPlan, service: Service) -> TokenizedDecision:
    """The token ids of a plan. Long ones are made in a thread. Raises `InvalidRequest`."""
    given = plan.input if isinstance(plan.input, str) else orjson.dumps(plan.input)
    texts = [given, *(each.instructions for each in plan.questions)]
    num_options = sum(len(each.options) for each in plan.questions)
    work = partial(_tokenize, plan, service)
    if fits_on_loop(texts, len(texts) + num_options):
        return work()
    return await run_in_thread(work)


def _tokenize(plan: DecisionPlan, service: Service) -> TokenizedDecision:
    tokenizer, place = service.model.tokenizer, service.new_id("question-")
    most = service.engine.scheduler.settings.max_model_len
    is_plain = isinstance(plan.input, str) and service.model.template is None
    if isinstance(plan.input, str) and is_plain:
        before, after, gap = f"{plan.input}{GAP}", "\nAnswer:", " "
    else:
        before, after, gap = (*_around(plan, service, place), "")
    shared = token_ids(tokenizer, before, "input", add_special_tokens=is_plain, most=most)
    encode = partial(_encode, tokenizer, gap)
    questions = []
    for question in plan.questions:
        labels = labels_of(question, encode)
        ids = [encode(label) for label in labels]
        tail = token_ids(
            tokenizer,
            f"{question.text(labels)}{after}",
            question.field,
            add_special_tokens=False,
            most=most,
        )
        questions.append(TokenizedQuestion(tail, ids, tree_of(ids, question.field)))
    return TokenizedDecision(shared, questions)


def _encode(tokenizer: Tokenizer, gap: str, label: str) -> Prompt:
    return tuple(tokenizer.encode(f"{gap}{label}", add_special_tokens=False))


def _around(plan: DecisionPlan, service: Service, place: str) -> tuple[str, str]:
    """What the chat template writes before and behind a question that stands for `place`."""
    given = plan.input
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": given}]
    if not isinstance(given, str):
        messages = [*given]
    last = messages[-1]
    if last["role"] == "user":
        content, question = last["content"], f"{GAP}{place}"
        if isinstance(content, str):
            content = f"{content}{question}"
        else:  # parts, of which one has a breakpoint
            content = [*content, {"type": "text", "text": question}]
        messages[-1] = {**last, "content": content}
    else:
        messages.append({"role": "user", "content": place})
    request = chat_of(
        {"model": plan.model, "messages": messages, "chat_template_kwargs": NO_REASONING}
    )
    before, *behind = render_text(service.model, request).split(place)
    if len(behind) != 1:
        raise InvalidRequest(
            "The chat template of this model does not render the last message unchanged, so it "
            "cannot ask questions about 'input'.",
            "input",
        )
    return before, behind[0]
