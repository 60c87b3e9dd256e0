"""What an HTTP request wants, for every endpoint: a `GenerationPlan` and its request specs.

Order ──read──▶ prompts ──asks──▶ Ask × choices
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import ContextTooLong, InvalidRequest
from engine.request import RequestSpec
from gateway.schema.fields.output import OutputConstraint
from gateway.schema.fields.scheduling import SchedulingParams
from gateway.schema.rendering import ReportOptions, ResponseRenderer

if TYPE_CHECKING:
    from engine.step import SamplingParams
    from gateway.access.callers import Caller
    from gateway.generation.prompt import Prompt, TokenizedPrompts
    from gateway.service import Service


class LengthLimits(NamedTuple):
    """How long an answer may be; `max_tokens` None: what the context leaves."""

    max_tokens: int | None
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """An HTTP request for text, understood and not yet begun.

    `read` may wait (long prompts leave the loop). `sampling` is that of the first choice of
    a prompt; `param` is the field that holds the prompt, for complaints about its length.
    """

    caller: "Caller"
    read: Callable[[], Awaitable["TokenizedPrompts"]]
    sampling: "SamplingParams"
    limits: LengthLimits
    end_ids: frozenset[int]
    stops: tuple[str, ...]
    wishes: SchedulingParams
    num_choices: int
    param: str
    frames: ResponseRenderer
    own_ends: frozenset[int] = frozenset()  # of the `end_ids`, those that the caller named
    told: ReportOptions = ReportOptions()  # noqa: RUF009 # frozen
    held: OutputConstraint | None = None
    avoided_ids: frozenset[int] = frozenset()  # of the `end_ids`, those that `held` must force
    seal: "Callable[[], Awaitable[None]] | None" = None  # awaited before the last bytes go out
    best_of: int | None = None  # so many are made for each prompt, and the likeliest told

    @property
    def num_candidates(self) -> int:
        """Answers that are made for each prompt."""
        return self.best_of or self.num_choices

    @property
    def is_mute(self) -> bool:
        """Whether only the prompt is told; one token is made, since the engine makes no fewer."""
        return self.limits.max_tokens == 0


def request_specs(order: GenerationPlan, prompt: "Prompt", service: "Service") -> list[RequestSpec]:
    """One ask per choice; choice `i` has a seed of its own that follows from the first's."""
    if not prompt:
        raise InvalidRequest(f"'{order.param}' has no tokens.", order.param)
    if max(prompt) >= service.model.vocabulary.size:
        message = f"'{order.param}' has tokens that the model does not know."
        raise InvalidRequest(message, order.param)
    max_tokens = max(1, _max_tokens(order, len(prompt), service))
    told = order.told
    is_ranked = order.num_candidates > order.num_choices
    echoed = told.logprobs if told.echo else None
    wishes = _scheduling(order)
    return [
        RequestSpec(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=replace(order.sampling, seed=derived_seed(order.sampling.seed, choice)),
            end_ids=order.end_ids,
            min_tokens=order.limits.min_tokens,
            logprobs=0 if is_ranked and told.logprobs is None else told.logprobs,
            prompt_logprobs=echoed if told.prompt_logprobs is None else told.prompt_logprobs,
            grammar=None if order.held is None else order.held.grammar,
            avoided_ids=order.avoided_ids,
            label=order.caller.request_id,
            tenant=order.caller.tenant,
            weight=order.caller.weight,
            **wishes._asdict(),
        )
        for choice in range(order.num_candidates)
    ]


def _scheduling(order: GenerationPlan) -> SchedulingParams:
    """A key may have a bound on how urgent its requests are; lower goes first."""
    most, asked = order.caller.urgent, order.wishes.priority
    if most is None or asked >= most:
        return order.wishes
    if asked:
        raise InvalidRequest(
            f"Invalid 'priority': this API key may ask for {most} and above, but the request "
            f"(by its 'priority' or 'service_tier') asks for {asked}.",
            "priority",
        )
    return order.wishes._replace(priority=most)


def _max_tokens(order: GenerationPlan, prompt_len: int, service: "Service") -> int:
    limits = order.limits
    try:
        if limits.max_tokens is None:
            max_tokens = service.room_for_output(prompt_len)
        else:
            max_tokens = limits.max_tokens
            service.engine.check_fits(prompt_len, max_tokens)
    except ContextTooLong as error:
        error.param = order.param
        raise
    if limits.min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' ({limits.min_tokens}) is more than the answer may have ({max_tokens}).",
            "min_tokens",
        )
    return max_tokens


def derived_seed(seed: int, choice: int) -> int:
    """The seed of a choice: the first has the request's own, the others' follow from it."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
