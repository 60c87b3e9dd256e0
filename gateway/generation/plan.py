"""GenerationPlan: a decoded, checked HTTP request for text, before it enters the engine.

body ──decode──▶ wire shape ──build_plan──▶ GenerationPlan ──request_specs──▶ Request × choices
"""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from engine.errors import ContextTooLong, InvalidRequest
from engine.lora import LoraAdapter
from engine.pooling import PoolSpec
from engine.request import Caching, RequestSpec
from engine.step import SamplingParams
from gateway.access.callers import Caller
from gateway.generation.conversation import tokenize_chat
from gateway.generation.image_prompt import ImageOrigin, ImagePrompt, check_images, cut_before
from gateway.generation.prompt import Prompt, TokenizedPrompts
from gateway.generation.tool_grammar import tool_constraint, without_calls
from gateway.generation.turn import Turn
from gateway.schema.decoding import invalid
from gateway.schema.fields.generation import GenerationRequest, OutputConstraint
from gateway.schema.fields.sampling import PromptCacheOptions, SchedulingParams
from gateway.schema.openai.chat import ChatRequest
from gateway.schema.rendering import ReportOptions, ResponseRenderer
from gateway.service import Service

MAX_TOKENS_HEADER = "x-podway-max-tokens"  # the bound, if it is lower than the request's


class Background(NamedTuple):
    """A response that is generated whether a client listens or not; its events can be read by its
    id. `accepted` renders the first events, `snapshot` the response as it is; `on_failure` is
    awaited if it fails or is cancelled."""

    response_id: str
    accepted: Callable[[], bytes]
    snapshot: Callable[[], bytes]
    on_failure: Callable[[], Awaitable[None]]


class LengthLimits(NamedTuple):
    """Output length in tokens; `max_tokens` None means up to the end of the context.

    `is_strict`: a `max_tokens` for which the context has no room is an error, as in OpenAI's
    completions. Otherwise it is an upper bound, and the output ends with the context.
    """

    max_tokens: int | None
    min_tokens: int = 0
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What to generate for one HTTP request, and how to render it.

    `tokenize` yields the prompts; it awaits a thread if they are long. `sampling` has the seed of
    the first choice. `prompt_field` is the request field that holds the prompt; errors about the
    prompt's length name it.
    """

    caller: Caller
    tokenize: Callable[[], Awaitable[TokenizedPrompts]]
    renderer: ResponseRenderer
    sampling: SamplingParams
    limits: LengthLimits
    stop_strings: tuple[str, ...]
    caller_end_ids: frozenset[int]  # the request's `stop_token_ids`
    scheduling: SchedulingParams
    report: ReportOptions
    num_choices: int
    best_of: int | None = None  # candidates per prompt; the most likely `num_choices` are returned
    ignores_eos: bool = False
    truncate_prompt_tokens: int | None = None
    is_stream: bool = False
    prompt_field: str = "messages"
    constraint: OutputConstraint | None = None
    prediction: str = ""  # text that the outputs are expected to repeat, if the engine can use it
    on_complete: Callable[[], Awaitable[None]] | None = None  # awaited before the last bytes
    lora: LoraAdapter | None = None  # None: the base model
    listed: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while it runs
    background: Background | None = None
    is_held: bool = False  # its events are kept in a ring
    turn: Turn | None = None  # None: its connection keeps no conversation
    cache: PromptCacheOptions = PromptCacheOptions()  # noqa: RUF009 # frozen
    cache_key: str = ""  # the request's `prompt_cache_key`

    @property
    def num_candidates(self) -> int:
        """Outputs generated per prompt."""
        return self.best_of or self.num_choices

    @property
    def is_ranked(self) -> bool:
        """Whether more outputs are generated than returned."""
        return self.num_candidates > self.num_choices

    @property
    def is_prompt_only(self) -> bool:
        """Whether only the prompt is reported (`max_tokens` 0 with `echo`).

        One token is generated all the same, because the engine has no requests of zero tokens.
        """
        return self.limits.max_tokens == 0

    @property
    def is_prefill(self) -> bool:
        """Whether only the prompt is computed, for a request that comes later."""
        return bool(self.cache.prewarm) or (self.turn is not None and not self.turn.generates)


def plan_chat(
    request: ChatRequest,
    renderer: ResponseRenderer,
    caller: Caller,
    service: Service,
    turn: Turn | None = None,
    image_fields: Sequence[str] = (),
) -> GenerationPlan:
    """The plan of a checked chat request, whichever API it came from; `image_fields` are the paths
    of its images there.

    Raises `InvalidRequest` for tools, images or values that this model does not support.
    """
    origin = ImageOrigin(service.image_sender(caller), image_fields)
    if request.images:
        check_images(service.model, request, origin)
    model, tools, constraint = service.model, request.tool_plan(), request.constraint()
    skips_reasoning = tools.must_call or constraint is not None
    if tools.offered:
        constraint = tool_constraint(tools, constraint, model.dialect)
    tokenize = partial(
        tokenize_chat,
        model,
        request,
        tools,
        service.random.getrandbits,
        skips_reasoning=skips_reasoning,
        most=longest_prompt(request, service),
        known=None if turn is None else turn.known_to(model),
        continuation=None if turn is None else turn.continuation,
        origin=origin,
    )
    plan = build_plan(request, tokenize, renderer, caller, service)
    if tools.listed and not tools.offered:
        plan = replace(plan, sampling=without_calls(plan.sampling, model))
    can_speculate = service.engine.scheduler.drafter is not None
    prediction = request.prediction.text if request.prediction and can_speculate else ""
    return replace(plan, constraint=constraint, prediction=prediction, turn=turn)


def build_plan(
    request: GenerationRequest,
    tokenize: Callable[[], Awaitable[TokenizedPrompts]],
    renderer: ResponseRenderer,
    caller: Caller,
    service: Service,
) -> GenerationPlan:
    """The plan for the fields that every endpoint shares.

    Raises `InvalidRequest` for a value that this model's vocabulary does not allow.
    """
    vocabulary, defaults = service.model.vocabulary, service.model.sampling_defaults
    request.check_allowed_token_ids(vocabulary)
    return GenerationPlan(
        caller=caller,
        tokenize=tokenize,
        renderer=renderer,
        sampling=request.sampling(vocabulary, service.seed(), defaults),
        limits=LengthLimits(
            request.max_output, request.min_tokens or 0, service.is_strict_about_max_tokens
        ),
        stop_strings=request.stops,
        caller_end_ids=request.caller_end_ids(vocabulary),
        scheduling=request.scheduling_params,
        report=request.report_options,
        num_choices=request.num_choices,
        best_of=request.num_candidates,
        ignores_eos=request.never_ends(vocabulary),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        is_stream=bool(request.stream),
        lora=service.lora_of(request.model),
        cache=request.cache_options,
        cache_key=request.prompt_cache_key or "",
    )


def longest_prompt(request: GenerationRequest, service: Service) -> int | None:
    """The most tokens that a prompt may have; None if longer ones are truncated."""
    is_truncated = request.truncate_prompt_tokens is not None
    return None if is_truncated else service.engine.scheduler.settings.max_model_len


def request_specs(
    plan: GenerationPlan,
    whole: ImagePrompt,
    service: Service,
    prediction: Prompt = (),
    breakpoints: Sequence[int] = (),
) -> list[RequestSpec]:
    """One engine request per candidate. Each has its own seed, derived from the plan's.

    `whole` is the prompt before it is truncated, `prediction` has the tokens of the plan's
    prediction, `breakpoints` are those of its cache.

    Raises `InvalidRequest` for a prompt or a length that the engine cannot serve.
    """
    prompt, media, _ = truncated(plan, whole, service)
    num_cut = len(whole.ids) - len(prompt)
    checkpoints = tuple([at - num_cut for at in breakpoints if at > num_cut])
    max_tokens = max(1, _max_tokens(plan, len(prompt), service))
    check_ids(prompt, plan.prompt_field, service)
    report, constraint = plan.report, plan.constraint
    eos_ids = service.model.vocabulary.eos_token_ids
    # A grammar ends in an end token: with `ignore_eos` it must stay possible, but never preferred.
    avoided_ids = eos_ids - plan.caller_end_ids if plan.ignores_eos and constraint else frozenset()
    end_ids = plan.caller_end_ids | (avoided_ids if plan.ignores_eos else eos_ids)
    echo_logprobs = report.logprobs if report.echo else None
    spec = RequestSpec(
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=plan.sampling,
        end_ids=end_ids,
        min_tokens=plan.limits.min_tokens,
        logprobs=0 if plan.is_ranked and report.logprobs is None else report.logprobs,
        prompt_logprobs=echo_logprobs if report.prompt_logprobs is None else report.prompt_logprobs,
        grammar=None if constraint is None else constraint.grammar,
        avoided_ids=avoided_ids,
        prediction=prediction,
        media=media,
        lora=plan.lora,
        caching=Caching(
            max(checkpoints, default=0) if plan.cache.mode == "explicit" else None,
            seconds=plan.cache.seconds,
            checkpoints=checkpoints,
            key=plan.cache_key,
        ),
        **caller_fields(plan.scheduling, plan.caller),
    )
    if plan.is_prefill:
        return [_prefill(spec, is_background=bool(plan.cache.prewarm))]
    seed = plan.sampling.seed
    return [
        replace(spec, sampling=replace(plan.sampling, seed=derived_seed(seed, choice)))
        for choice in range(plan.num_candidates)
    ]


def _prefill(spec: RequestSpec, *, is_background: bool) -> RequestSpec:
    """The request that only computes the prompt; in the background, with what others leave."""
    return replace(
        spec,
        max_tokens=0,
        min_tokens=0,
        pooling=PoolSpec(),
        logprobs=None,
        prompt_logprobs=None,
        grammar=None,
        is_background=spec.is_background or is_background,
    )


def truncated(plan: GenerationPlan, prompt: ImagePrompt, service: Service) -> ImagePrompt:
    """The last `truncate_prompt_tokens` tokens; for -1, as many as fit with `max_tokens`. An image
    is left out as a whole."""
    keep = plan.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep < 0:
        keep = max(
            1, service.engine.scheduler.settings.max_model_len - (plan.limits.max_tokens or 1)
        )
    return cut_before(prompt, keep)


def check_ids(ids: Prompt, param: str, service: Service) -> None:
    """Raise `InvalidRequest`, which names the field `param`, for no ids and for unknown ones."""
    if not ids:
        raise InvalidRequest(f"'{param}' has no tokens.", param)
    size = service.model.vocabulary.size
    if max(ids) >= size:
        message = f"'{param}' has a token id that is not below the vocabulary size, {size}."
        raise InvalidRequest(message, param)


def caller_fields(requested: SchedulingParams, caller: Caller) -> dict[str, Any]:
    """The fields of a `RequestSpec` that say whose request it is, and when it runs."""
    return {
        "label": caller.request_id,
        "tenant": caller.tenant,
        "client": caller.client,
        "weight": caller.key.allowance.weight,
        "itl_goal": caller.key.allowance.itl_goal,
        **_scheduling(requested, caller)._asdict(),
    }


def _scheduling(requested: SchedulingParams, caller: Caller) -> SchedulingParams:
    """The scheduling parameters, with the salt of the API key's cache domain and within the
    priorities that the key allows (lower is first)."""
    scheduling = requested._replace(salt=caller.salt(requested.salt))
    most_urgent, priority = caller.key.allowance.priority, scheduling.priority
    if most_urgent is None or priority >= most_urgent:
        return scheduling
    if priority:
        raise invalid(
            "priority",
            f"this API key allows priorities of {most_urgent} and above, but 'priority' "
            f"or 'service_tier' requests {priority}.",
        )
    return scheduling._replace(priority=most_urgent)


def _max_tokens(plan: GenerationPlan, prompt_len: int, service: Service) -> int:
    limits, max_tokens = plan.limits, plan.limits.max_tokens
    asked = max_tokens if limits.is_strict else None
    check_fits(prompt_len, asked, plan.prompt_field, service)
    room = service.room_for_output(prompt_len)
    if max_tokens is None:
        max_tokens = room
    elif max_tokens > room:
        max_tokens = room
        plan.caller.reports[MAX_TOKENS_HEADER] = str(room)
    if limits.min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' ({limits.min_tokens}) is more than the output can have: {max_tokens}.",
            "min_tokens",
        )
    return max_tokens


def check_fits(prompt_len: int, max_tokens: int | None, param: str, service: Service) -> None:
    """Raise `ContextTooLong`, which names the field `param`, if so many tokens exceed the context;
    `max_tokens` None: if no output token fits."""
    try:
        service.engine.check_fits(prompt_len, 1 if max_tokens is None else max_tokens)
    except ContextTooLong as error:
        error.param = param
        raise


def derived_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice`: the request's own for 0, a hash of both after that."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
