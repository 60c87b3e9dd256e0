"""`POST /v1/completions`."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gateway.generation.plan import GenerationPlan, build_plan, check_fits, longest_prompt
from gateway.generation.prompt import tokenize_prompts
from gateway.schema.openai.completion_renderer import CompletionRenderer
from gateway.schema.openai.completions import DEFAULT_MAX_TOKENS, decode_completion, size_of
from gateway.schema.openai.event_envelope import token_formatter

if TYPE_CHECKING:
    from gateway.access.callers import Caller
    from gateway.service import Service


def plan_completion(body: bytes, caller: "Caller", service: "Service") -> GenerationPlan:
    """The plan of a request body; raises `InvalidRequest` for what cannot be served."""
    _check_size(body, service)
    request = decode_completion(body, caller.unknown_fields)
    service.check_generates(request.model)
    model = service.model
    most = longest_prompt(request, service)
    prompts = request.prompts(model.vocabulary)
    tokenize = partial(tokenize_prompts, model.tokenizer, prompts, most)
    renderer = CompletionRenderer(
        service.header("cmpl", request.model),
        request.usage_options,
        token_formatter(request.report_options, model.tokenizer),
    )
    plan = build_plan(request, tokenize, renderer, caller, service)
    limits = plan.limits._replace(is_strict=True)
    return replace(plan, constraint=request.constraint(), prompt_field="prompt", limits=limits)


def _check_size(body: bytes, service: "Service") -> None:
    """Raise `ContextTooLong` for a prompt of far too many token ids, before they are decoded."""
    if body.count(b",") < service.engine.scheduler.settings.max_model_len:
        return
    size = size_of(body)
    max_tokens = DEFAULT_MAX_TOKENS if size.max_tokens is None else size.max_tokens
    if size.num_ids > service.engine.scheduler.settings.max_model_len:
        check_fits(size.num_ids, max_tokens, "prompt", service)
