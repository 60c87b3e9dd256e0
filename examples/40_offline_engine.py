"""The engine as a library, without HTTP and in one process. All prompts share its iterations.

    python examples/40_offline_engine.py [PROMPT ...]

A server differs in one object: `MultiprocessExecutor` instead of `InlineExecutor`.
"""

import asyncio
import sys
import time
from pathlib import Path

import adapters
from adapters.dialects import load_chat_template
from adapters.tokenizers import load_tokenizer
from engine.control.scheduler import IterationScheduler, SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import FinishReason, RequestSpec
from engine.step import SamplingParams, WorkerSettings
from engine.transport.inline import InlineExecutor
from engine.worker.process.worker import Worker
from gateway.ports import Tokenizer

PROMPTS = ("Hello!", "What is 2 + 3?", "What is Podway?", "Tell me a story.")
MODEL = Path(adapters.__file__).parent / "builtin"


async def generate(engine: Engine, tokenizer: Tokenizer, spec: RequestSpec) -> str:
    """Read the request's tokens to the end. Leaving the `with` block early cancels it."""
    decoder = tokenizer.decoder()
    text = b""
    with engine.stream(spec) as stream:
        finish: FinishReason | None = None
        while finish is None:
            chunk = await stream.next()
            text += b"".join(map(decoder.feed, chunk.tokens))
            finish = chunk.finish
    return text.decode(errors="replace").strip()


async def run(engine: Engine, tokenizer: Tokenizer, specs: list[RequestSpec]) -> list[str]:
    """Run the engine until all requests have ended."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        texts = await asyncio.gather(*(generate(engine, tokenizer, spec) for spec in specs))
        running.cancel()
    return texts


def main() -> None:
    prompts = sys.argv[1:] or PROMPTS
    worker = Worker.load(WorkerSettings(str(MODEL)), lambda what, done, total: None)
    report = worker.report  # what loading the model has shown: block count, end tokens, …
    settings = SchedulerSettings(max_model_len=report.max_model_len)
    ledger = KVLedger(report.num_blocks, report.block_size)
    scheduler = IterationScheduler(settings, ledger, FirstComeFirstServed())
    engine = Engine(scheduler, InlineExecutor(worker), time.perf_counter)

    tokenizer, template = load_tokenizer(MODEL), load_chat_template(MODEL)
    assert template is not None  # the built-in model has one
    specs = []
    for prompt in prompts:
        text = template.render([{"role": "user", "content": prompt}])
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        greedy, ends = SamplingParams(temperature=0), frozenset(report.eos_token_ids)
        specs.append(RequestSpec(ids, max_tokens=80, sampling=greedy, end_ids=ends))

    started = time.perf_counter()
    texts = asyncio.run(run(engine, tokenizer, specs))
    seconds = time.perf_counter() - started
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"> {prompt}\n{text}\n")
    print(f"{len(texts)} answers in {scheduler.num_committed} iterations, {seconds:.2f} s")


if __name__ == "__main__":
    main()
