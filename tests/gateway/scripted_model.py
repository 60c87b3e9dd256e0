"""A scripted model over bytes: tokens are bytes, `END` ends a text, and the texts are given."""

import asyncio
import base64
import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from adapters.dialects.jinja_template import JinjaTemplate, compile_request_template
from adapters.grammar.compile_process import first_error
from adapters.grammar.llguidance_masks import LlguidanceCompiler
from engine.errors import Unavailable, WorkerLost
from engine.grammar import GrammarCompiler, TokenTable
from engine.simulated.executor import SimulatedExecutor
from engine.step import Grammar, Step, StepEntry, StepResult, TokenLogprobs
from gateway.ports import EncodedImage, ImageTile, PreparedImage, UnreadableImage
from tests.blank import blank

T = TypeVar("T")
END = 256
BAD, LOST = b"bad", b"lost"  # images


class ByteDecoder:
    """Each id is a byte; the end token decodes to nothing."""

    def feed(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b""


class ByteTokenizer:
    """UTF-8 bytes as ids."""

    vocab_size = END + 1
    special_ids = frozenset({END})
    special_tokens: Mapping[str, int] = MappingProxyType({"<end>": END})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        ids = [*first.encode(), END]
        return [*ids, *second.encode(), END], len(ids)

    def decoder(self) -> ByteDecoder:
        return ByteDecoder()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b"<end>"


@cache
def byte_grammars() -> GrammarCompiler:
    """A grammar compiler over bytes with the end token `END`."""
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    table = TokenTable(tokens, {"<end>": END}, lambda text: list(text.encode()))
    return LlguidanceCompiler(table, END + 1)


class CheckedOnLoop:
    """A `GrammarChecker` that compiles on the event loop, since virtual time has no processes."""

    def __init__(self) -> None:
        self._compiler = byte_grammars()

    async def check(self, grammar: Grammar, seconds: float | None = None) -> str | None:
        return first_error(self._compiler, grammar)

    async def close(self) -> None: ...


class PlainTemplate:
    """`role:content` lines."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        names = [tool["function"]["name"] for tool in kwargs.get("tools", ())]
        lines = [f"tools:{','.join(names)}\n"] if names else []
        return "".join((*lines, *(f"{m['role']}:{m['content']}\n" for m in messages)))

    async def render_source(
        self,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        template = compile_request_template(source, {})
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)


IMAGES_TEMPLATE = """
{%- for m in messages %}{{ m.role }}:
    {%- if m.content is string %}{{ m.content }}
    {%- else %}
        {%- for part in m.content %}{{ "<image>" if part.type == "image" else part.text }}
        {%- endfor %}
    {%- endif %}{{ "\\n" }}
{%- endfor %}"""


def image_template() -> JinjaTemplate:
    """`role:content` lines with placeholders for images."""
    return compile_request_template(IMAGES_TEMPLATE, {})


class ScriptedDecoder:
    """Prepares any bytes but `BAD` as a tile of three tokens between brackets."""

    placeholder = "<image>"
    soft_token = "<end>"
    reserved = ("<image>", "<row>")

    def __init__(self, num_tiles: int = 1) -> None:
        self.seen: list[tuple[bytes, int]] = []  # images and their budgets
        self._num_tiles = num_tiles

    async def prepare(self, image: EncodedImage, max_tokens: int) -> PreparedImage:
        data = image.data
        if isinstance(data, str):
            data = base64.b64decode(data)
        self.seen.append((data, max_tokens))
        if data == BAD:
            raise UnreadableImage("is truncated or damaged")
        if data == LOST:
            raise Unavailable("it was lost; please try again.")
        tile = ImageTile(3, hashlib.sha256(data).digest(), blank(4, 1, 16), (1, 2, 2))
        return PreparedImage(("[", *[tile] * self._num_tiles, "]"))

    async def close(self) -> None:
        """It keeps nothing."""


class ScriptedTexts:
    """The sampled tokens: the given texts in order of arrival, repeated."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts: list[list[int]] = [[*text.encode(), END] for text in texts]
        self._starts: dict[int, int] = {}

    def __call__(self, entry: StepEntry) -> int:
        position = entry.start + len(entry.tokens)
        start = self._starts.setdefault(entry.request_id, position)
        text = self._texts[entry.request_id % len(self._texts)]
        return text[min(position - start, len(text) - 1)]


class Inline:
    """The store's `StoreExecutor` without threads."""

    async def __call__(self, work: Callable[[], T]) -> T:
        return work()

    def close(self) -> None:
        return None


class MortalExecutor(SimulatedExecutor):
    """A simulated worker that can die; it restarts at once."""

    _is_alive = True
    _on_lost: Callable[[], object] = staticmethod(lambda: None)
    _flights: "list[asyncio.Future[StepResult]]"

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    def watch(self, on_lost: Callable[[], object]) -> None:
        self._on_lost, self._flights = on_lost, []

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        flight: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self._flights = [each for each in self._flights if not each.done()] + [flight]

        def settle(done: "asyncio.Future[StepResult]") -> None:
            if not flight.done():
                flight.set_result(done.result())

        super().submit(step).add_done_callback(settle)
        return flight

    def kill(self) -> None:
        self._is_alive = False
        for flight in self._flights:
            if not flight.done():
                flight.set_exception(WorkerLost("killed"))
        self._on_lost()

    async def restart(self) -> None:
        self._is_alive = True


class ScoringExecutor(MortalExecutor):
    """Reports log-probabilities where requested: -0.01 for token 1, -0.02 for token 2, …

    The most likely tokens are the sampled one and those with the next higher ids. A prompt is
    pooled into the vector of `vector_of`.
    """

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        plain = super().submit(step)
        pooled = [entry for entry in step.entries if entry.pooling is not None]
        if pooled:
            vectors = tuple(vector_of(entry) for entry in pooled)
            changed: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
            plain.add_done_callback(
                lambda done: changed.set_result(replace(done.result(), vectors=vectors))
            )
            return changed
        entries = [entry for entry in step.entries if entry.sample is not None]
        samples = [entry.sample for entry in entries if entry.sample is not None]
        targets = [entry.prompt_logprobs for entry in step.entries]
        if not any(targets) and all(sample.logprobs is None for sample in samples):
            return plain
        scored: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()

        def score(done: "asyncio.Future[StepResult]") -> None:
            result = done.result()
            num_accepted = iter(result.num_accepted)
            counts = [1 + next(num_accepted) if entry.num_drafts else 1 for entry in entries]
            per_token = [s for s, count in zip(samples, counts, strict=True) for _ in range(count)]
            sampled = zip(per_token, result.tokens, strict=True)
            scored.set_result(
                replace(
                    result,
                    logprobs=tuple(
                        None if sample.logprobs is None else scores_of(token, sample.logprobs)
                        for sample, token in sampled
                    ),
                    prompt_logprobs=tuple(
                        () if t is None else tuple(scores_of(i, t.top) for i in t.ids)
                        for t in targets
                    ),
                )
            )

        plain.add_done_callback(score)
        return scored


def vector_of(entry: StepEntry) -> bytes:
    """The vector of a prompt in the rig: four numbers, and fewer if `dimensions` says so; or the
    log-probabilities of tokens as in `ScoringExecutor`."""
    numbers = (entry.start + len(entry.tokens), *entry.tokens[:2], entry.tokens[-1], 0.5)[:4]
    assert entry.pooling is not None, "a pooling entry"
    if entry.pooling.token_ids:
        return array("f", [-token / 100 for token in entry.pooling.token_ids]).tobytes()
    if entry.pooling.first_len is not None:  # a pair: its second text decides
        at = entry.pooling.first_len - entry.start  # in another piece, if the prompt is cut
        numbers = (entry.tokens[min(max(at, 0), len(entry.tokens) - 1)],)
    return array("f", numbers[: entry.pooling.dimensions]).tobytes()


def scores_of(token: int, num_top: int) -> TokenLogprobs:
    """The log-probabilities of a token in the rig."""
    top = ((other, -other / 100) for other in range(token, token + num_top))
    return TokenLogprobs(-token / 100, 1, tuple(top))
