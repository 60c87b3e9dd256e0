"""Clients with random requests, who check what they read and leave early now and then."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from engine.errors import EngineError, InvalidRequest, Overloaded, Unavailable
from engine.lora import LoraAdapter
from engine.pooling import PoolSpec
from engine.request import Caching, FinishReason, Request, RequestSpec
from engine.step import Grammar, GrammarKind, RequestId, SamplingParams, TokenLogprobs
from engine.stream import TokenStream
from tests.fuzz.engine.answers import logprob_of, vector_of
from tests.fuzz.engine.language import END, Text
from tests.fuzz.engine.wrong import Wrong

if TYPE_CHECKING:
    from engine.loop import Engine
    from tests.fuzz.engine.drawing import Settings

LORAS = (LoraAdapter(1, "first", "aa" * 16), LoraAdapter(2, "second", "bb" * 16))


@dataclass(slots=True)
class Received:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None


class Clients:
    """Send the requests of a case; `results` has what each request's client received."""

    def __init__(self, settings: "Settings", random: Random, counts: "Counter[str]") -> None:
        self._settings = settings
        self._random = random
        self._counts = counts
        longest = settings.scheduler.max_model_len - 1
        self._prefixes = [self._tokens(random.randint(1, longest)) for _ in range(3)]
        self.results: dict[RequestId, tuple[tuple[int, ...], FinishReason | None]] = {}

    async def run(self, engine: "Engine") -> None:
        """Send all requests, and wait for their ends."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._settings.num_requests):
                spec = self.draw_spec()
                for _ in range(self._random.choice([1, 1, 1, 3])):
                    clients.create_task(self._request(spec, engine))
                if self._random.random() < 0.7:
                    await asyncio.sleep(self._settings.clients.gap * self._random.random())

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple([self._random.randrange(4) for _ in range(count)])

    def draw_spec(self) -> RequestSpec:
        """A request; half of them begin with one of three prefixes."""
        random, choose = self._random, self._random.choice
        longest = self._settings.scheduler.max_model_len
        prompt = self._tokens(random.randint(1, longest - 1))
        if random.random() < 0.5:
            prefix = choose(self._prefixes)
            prompt = prefix[: random.randint(1, len(prefix))] + self._tokens(choose([0, 0, 1, 3]))
        prompt = prompt[: longest - 1]
        room = longest - len(prompt)
        max_tokens = min(room, choose([1, 2, 10, room, random.randint(1, room)]))
        min_tokens = choose([0, 0, 0, min(max_tokens, 4)])
        is_pooled = random.random() < 0.05
        grammar = Grammar(GrammarKind.JSON_OBJECT) if random.random() < 0.15 else None
        return RequestSpec(
            prompt=prompt,
            max_tokens=0 if is_pooled else max_tokens,
            sampling=SamplingParams(
                frequency_penalty=choose([0.0, 0.0, 0.5]),
                repetition_penalty=choose([1.0, 1.0, 1.1]),
            ),
            end_ids=frozenset({END}) if random.random() < 0.7 else frozenset(),
            min_tokens=0 if is_pooled else min_tokens,
            label=choose("ab"),
            salt=choose(["", "", "x", "y"]),
            priority=random.randint(-1, 1),
            tenant=(key := choose("abc")),
            client=key,
            weight=choose([1.0, 2.5]),
            ttft_deadline=choose([None, None, None, 0.5, 30.0]),
            deadline=choose([None, None, None, None, 0.3, 3.0]),
            is_background=random.random() < 0.2,
            itl_goal=choose([None, None, 0.03]),
            logprobs=choose([None, None, 1]),
            prompt_logprobs=None if is_pooled else choose([None, None, None, None, None, 0, 2]),
            grammar=None if is_pooled else grammar,
            prediction=self._tokens(10) if random.random() < 0.3 else (),
            lora=choose([None, None, *LORAS]) if self._settings.has_loras else None,
            pooling=PoolSpec() if is_pooled else None,
            caching=Caching(
                choose([None, None, None, None, 0, len(prompt) // 2]),
                seconds=choose([0.0, 0.0, 0.5, 30.0, 1e4]),
                checkpoints=tuple(random.choices(range(len(prompt) + 1), k=choose([0, 0, 1, 3]))),
            ),
        )

    async def _request(self, spec: RequestSpec, engine: "Engine") -> None:
        random, rate = self._random, self._settings.clients.cancel
        most = random.randint(0, 6) if random.random() < rate else None
        seconds = random.uniform(0.0, 2.0) if random.random() < rate else None
        received = Received()
        try:
            with engine.stream(spec) as stream:
                request = stream.request
                async with asyncio.timeout(seconds):
                    await self._read(stream, most, received)
        except (InvalidRequest, Overloaded, Unavailable) as error:
            self._counts[f"rejected: {type(error).__name__}"] += 1
            if not received.tokens:
                return
        except EngineError as error:
            self._counts[f"ended: {type(error).__name__}"] += 1
        except TimeoutError:
            self._counts["left"] += 1
        self._check(request, received)
        self.results[request.request_id] = tuple(received.tokens), received.finish

    async def _read(self, stream: TokenStream, most: int | None, received: Received) -> None:
        while most is None or len(received.tokens) < most:
            chunk = await stream.next()
            received.tokens += chunk.tokens
            received.logprobs += chunk.logprobs
            received.prompt_logprobs += chunk.prompt_logprobs
            received.finish = chunk.finish
            if chunk.finish is not None:
                return
        self._counts["left"] += 1

    def _check(self, request: Request, received: Received) -> None:
        """What a client reads is the request's text, up to where it ends."""
        spec, tokens, finish = request.spec, received.tokens, received.finish
        name, text = f"request {request.request_id}", Text(spec, 0)
        if tokens != text.output(len(tokens)):
            raise Wrong(f"{name} got {tokens}, not {text.output(len(tokens))}")
        if any(token in spec.end_ids for token in tokens[:-1]) or len(tokens) > spec.max_tokens:
            raise Wrong(f"{name} went on behind its end: {tokens}")
        if spec.logprobs is not None and [-one.logprob for one in received.logprobs] != tokens:
            raise Wrong(f"{name} got log-probabilities of other tokens")
        if finish is None:
            return
        self._counts["finished"] += 1
        if not spec.is_pooling:
            self._check_finished(request, received, text)
        elif request.vector != vector_of(text.digests[-1]):
            raise Wrong(f"{name} got another vector")

    def _check_finished(self, request: Request, received: Received, text: Text) -> None:
        spec, tokens, finish = request.spec, received.tokens, received.finish
        name = f"request {request.request_id}"
        is_stop = tokens[-1] in spec.end_ids
        if finish is not (FinishReason.STOP if is_stop else FinishReason.LENGTH):
            raise Wrong(f"{name} finished with {finish}: {tokens}")
        if not is_stop and len(tokens) < spec.max_tokens:
            raise Wrong(f"{name} ended after {len(tokens)} tokens")
        if spec.prompt_logprobs is not None:
            expected = [logprob_of(one) for one in text.digests[: len(spec.prompt) - 1]]
            if list(received.prompt_logprobs) != expected:
                raise Wrong(f"{name} got other log-probabilities of its prompt")
