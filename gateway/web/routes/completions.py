"""`POST /v1/completions`, and llama.cpp's `POST /infill`."""

from dataclasses import replace
from functools import partial

from gateway.access.callers import Caller
from gateway.generation.infill import Gap, OtherFile, infill_of
from gateway.generation.plan import (
    GenerationPlan,
    LengthLimits,
    build_plan,
    check_fits,
    longest_prompt,
)
from gateway.generation.prompt import tokenize_prompts
from gateway.schema.decoding import decode, decode_checked
from gateway.schema.openai.completions import DEFAULT_MAX_TOKENS, CompletionRequest, size_of
from gateway.schema.openai.infill import InfillRenderer, InfillRequest
from gateway.schema.openai.renderers import CompletionRenderer, token_formatter
from gateway.schema.rendering import ResponseRenderer
from gateway.service import Service


def plan_infill(body: bytes, caller: Caller, service: Service) -> GenerationPlan:
    """The plan of a request body; raises `InvalidRequest` for what cannot be served."""
    request = decode(InfillRequest, body, caller.unknown_fields)
    completion = request.as_completion(service.model.name)
    service.check_generates(completion.model)
    renderer = InfillRenderer(completion.model)
    plan = planned(completion, renderer, caller, service)
    files = [OtherFile(each.filename, each.text) for each in request.input_extra]
    gap = Gap(request.input_suffix, files, "input_suffix")
    return replace(
        filling(plan, completion, gap, service),
        limits=LengthLimits(completion.max_tokens),
        prompt_field="input_prefix",
    )


def plan_completion(body: bytes, caller: Caller, service: Service) -> GenerationPlan:
    """The plan of a request body; raises `InvalidRequest` for what cannot be served."""
    _check_size(body, service)
    request = decode_checked(CompletionRequest, body, caller.unknown_fields)
    service.check_generates(request.model)
    renderer = CompletionRenderer(
        service.header("cmpl", request.model),
        request.usage_options,
        token_formatter(request.report_options, service.model.tokenizer),
    )
    plan = planned(request, renderer, caller, service)
    return filling(plan, request, Gap(request.suffix), service) if request.suffix else plan


def planned(
    request: CompletionRequest, renderer: ResponseRenderer, caller: Caller, service: Service
) -> GenerationPlan:
    """The plan of a checked request, without its suffix."""
    prompts = request.prompts(service.model.vocabulary)
    most = longest_prompt(request, service)
    tokenize = partial(tokenize_prompts, service.model.tokenizer, prompts, most)
    plan = build_plan(request, tokenize, renderer, caller, service)
    limits = plan.limits._replace(is_strict=True)
    return replace(plan, constraint=request.constraint(), prompt_field="prompt", limits=limits)


def filling(
    plan: GenerationPlan, request: CompletionRequest, gap: Gap, service: Service
) -> GenerationPlan:
    """The plan whose output fills a gap behind the prompts. Raises `InvalidRequest` if the model
    cannot."""
    tokenizer = service.model.tokenizer
    infill = infill_of(tokenizer, request.model, gap.field)
    prompts, most = request.prompts(service.model.vocabulary), longest_prompt(request, service)
    return replace(
        plan,
        tokenize=partial(infill.tokenize, tokenizer, prompts, gap, most),
        caller_end_ids=plan.caller_end_ids | infill.end_ids,
    )


def _check_size(body: bytes, service: Service) -> None:
    """Raise `ContextTooLong` for a prompt of far too many token ids, before they are decoded."""
    if body.count(b",") < service.engine.scheduler.settings.max_model_len:
        return
    size = size_of(body)
    max_tokens = DEFAULT_MAX_TOKENS if size.max_tokens is None else size.max_tokens
    if size.num_ids > service.engine.scheduler.settings.max_model_len:
        check_fits(size.num_ids, max_tokens, "prompt", service)
