"""PoolingPlan: a decoded, checked HTTP request for vectors, before it enters the engine.

body ──decode──▶ wire shape ──plan_…──▶ PoolingPlan ──pooling_specs──▶ Request × inputs
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from engine.errors import InvalidRequest
from engine.lora import LoraAdapter
from engine.pooling import PoolSpec
from engine.request import RequestSpec
from engine.step import SamplingParams
from gateway.access.callers import Caller
from gateway.generation.plan import caller_fields, check_fits, check_ids
from gateway.generation.prompt import Prompt, fits_on_loop, token_ids
from gateway.generation.threads import run_in_thread
from gateway.ports import EncodesPairs, Tokenizer
from gateway.schema.fields.sampling import SchedulingParams
from gateway.service import Service

GREEDY = SamplingParams(temperature=0.0)  # unused: no token is sampled


class PairInput(NamedTuple):
    """Two texts that the model reads as two segments."""

    first: str
    second: str


class TemplatedInput(NamedTuple):
    """A prompt made of a pair of texts; `end` is what stands behind the second one."""

    text: str
    end: str

    @classmethod
    def of(cls, template: str, query: str, document: str) -> Self:
        """The prompt by a template with `{query}` and, behind it, `{document}`."""
        begin, _, rest = template.partition("{query}")
        middle, _, end = rest.partition("{document}")
        return cls(f"{begin}{query}{middle}{document}{end}", end)


PoolingInput = str | tuple[int, ...] | PairInput | TemplatedInput


class TokenizedInput(NamedTuple):
    """The ids of an input. `first_len` is the number of tokens of a pair's first text; the last
    `num_end` tokens stay if the input is truncated."""

    ids: Prompt
    first_len: int | None = None
    num_end: int = 0


async def tokenize_inputs(
    tokenizer: Tokenizer, inputs: Sequence[PoolingInput], fields: Sequence[str]
) -> list[TokenizedInput]:
    """The ids of all inputs, with the special tokens that the model expects around a text.

    Many or long texts are tokenized in a thread. Raises `InvalidRequest` that names one of `fields`
    for text that is not valid Unicode.
    """

    def tokenize() -> list[TokenizedInput]:
        return [_tokenized(tokenizer, *row) for row in zip(inputs, fields, strict=True)]

    texts = [text for each in inputs for text in _texts(each)]
    return tokenize() if fits_on_loop(texts, len(texts)) else await run_in_thread(tokenize)


def _texts(each: PoolingInput) -> Iterator[str]:
    if isinstance(each, str):
        yield each
    elif isinstance(each, PairInput | TemplatedInput):
        yield from each


def _tokenized(tokenizer: Tokenizer, each: PoolingInput, field: str) -> TokenizedInput:
    if isinstance(each, PairInput):
        return _tokenized_pair(tokenizer, each, field)
    if isinstance(each, TemplatedInput):
        ids = token_ids(tokenizer, each.text, field, add_special_tokens=False)
        end = token_ids(tokenizer, each.end, field, add_special_tokens=False)
        return TokenizedInput(ids, None, len(end))
    if isinstance(each, str):
        each = token_ids(tokenizer, each, field, add_special_tokens=True)
    return TokenizedInput(each, None, _num_special_at_end(tokenizer, each))


def _tokenized_pair(tokenizer: Tokenizer, pair: PairInput, field: str) -> TokenizedInput:
    assert isinstance(tokenizer, EncodesPairs), "a model that scores pairs has a tokenizer for them"
    try:
        ids, first_len = tokenizer.encode_pair(*pair)
    except UnicodeEncodeError as error:
        message = f"'{field}' is not valid Unicode: it has an unpaired surrogate."
        raise InvalidRequest(message, field) from error
    return TokenizedInput(tuple(ids), first_len, _num_special_at_end(tokenizer, ids))


def _num_special_at_end(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    return int(len(ids) > 1 and ids[-1] in tokenizer.special_ids)


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

    caller: Caller
    inputs: Sequence[PoolingInput]
    render: Callable[[PooledInputs], bytes]
    input_field: str
    scheduling: SchedulingParams
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    lora: LoraAdapter | None = None  # None: the base model
    fields: Sequence[str] = ()

    @property
    def input_fields(self) -> Sequence[str]:
        """The name of each input in errors."""
        if self.fields or len(self.inputs) == 1:
            return self.fields or [self.input_field]
        return [f"{self.input_field}[{index}]" for index in range(len(self.inputs))]


def pooling_specs(
    plan: PoolingPlan, tokenized: Sequence[TokenizedInput], service: Service
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


def _truncated(plan: PoolingPlan, each: TokenizedInput, service: Service) -> Prompt:
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
