"""PoolingPlan: a decoded, checked HTTP request for vectors, before it enters the engine.

body ──decode──▶ wire shape ──plan_…──▶ PoolingPlan ──pooling_specs──▶ Request × inputs
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.pooling import PoolSpec
from engine.request import RequestSpec
from engine.step import SamplingParams
from gateway.generation.plan import caller_fields, check_fits, check_ids
from gateway.schema.fields.sampling import SchedulingParams

if TYPE_CHECKING:
    from engine.lora import LoraAdapter
    from gateway.access.callers import Caller
    from gateway.generation.prompt import Prompt
    from gateway.pooling.inputs import PoolingInput, TokenizedInput
    from gateway.service import Service

GREEDY = SamplingParams(temperature=0.0)  # unused: no token is sampled


class PooledInputs(NamedTuple):
    """The vectors of all inputs in their order, as float32 bytes, and the number of tokens."""

    vectors: Sequence[bytes]
    prompt_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        """The field of a response."""
        return {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """What to pool for one HTTP request, and how to render the vectors as its response body.

    `input_field` is the request field that holds the inputs; errors about one of them name its own
    of `fields`, or its place in `input_field`. `truncate_prompt_tokens` keeps the first tokens of
    each input, -1: as many as fit.
    """

    caller: "Caller"
    inputs: "Sequence[PoolingInput]"
    render: Callable[[PooledInputs], bytes]
    input_field: str
    scheduling: SchedulingParams
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    lora: "LoraAdapter | None" = None  # None: the base model
    fields: Sequence[str] = ()

    @property
    def input_fields(self) -> Sequence[str]:
        """The name of each input in errors."""
        if self.fields or len(self.inputs) == 1:
            return self.fields or [self.input_field]
        return [f"{self.input_field}[{index}]" for index in range(len(self.inputs))]


def pooling_specs(
    plan: PoolingPlan, tokenized: "Sequence[TokenizedInput]", service: "Service"
) -> Iterator[RequestSpec]:
    """One engine request for each input.

    Raises `InvalidRequest` for an input without tokens, and `ContextTooLong`.
    """
    given = caller_fields(plan.scheduling, plan.caller)
    for field, each in zip(plan.input_fields, tokenized, strict=True):
        ids = _truncated(plan, each, service)
        check_fits(len(ids), 0, field, service)
        check_ids(ids, field, service)
        yield RequestSpec(
            prompt=tuple(ids),
            max_tokens=0,
            sampling=GREEDY,
            pooling=PoolSpec(plan.dimensions, each.first_len),
            lora=plan.lora,
            **given,
        )


def _truncated(plan: PoolingPlan, each: "TokenizedInput", service: "Service") -> "Prompt":
    """The first tokens of an input, and those at its end that have to stay."""
    keep, ids = plan.truncate_prompt_tokens, each.ids
    if keep is None:
        return ids
    if keep < 0:
        keep = service.engine.scheduler.settings.max_model_len
    if len(ids) <= keep:
        return ids
    stop = len(ids) - each.num_end
    return (*ids[: max(0, keep - each.num_end)], *ids[stop:])[:keep]
