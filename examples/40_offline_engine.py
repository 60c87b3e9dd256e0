"""The engine as a library: no HTTP, no second process. All prompts share the same iterations.

    python examples/40_offline_engine.py [PROMPT ...]

Steps run in this process, one per turn of the event loop; a server would use the multiprocess
transport instead, and nothing else would change.
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
MAX_TOKENS = 80


def show_progress(label: str, done: int, total: int) -> None:
    if done == total:
        print(f"{label}: {total}", file=sys.stderr)


async def answer(engine: Engine, tokenizer: Tokenizer, ask: RequestSpec) -> str:
    """Lease a stream, take tokens until it ends. Leaving the block early would free its slots."""
    decoder = tokenizer.decoder()
    text = b""
    with engine.stream(ask) as tokens:
        finish: FinishReason | None = None
        while finish is None:
            chunk = await tokens.next()
            text += b"".join(map(decoder.feed, chunk.tokens))
            finish = chunk.finish
    return text.decode(errors="replace").strip()


async def serve(engine: Engine, tokenizer: Tokenizer, asks: list[RequestSpec]) -> list[str]:
    """Run the engine beside its clients, and stop it when they have their answers."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        answers = await asyncio.gather(*(answer(engine, tokenizer, ask) for ask in asks))
        running.cancel()
    return answers


def main() -> None:
    prompts = sys.argv[1:] or PROMPTS
    worker = Worker.load(WorkerSettings(str(MODEL)), show_progress)
    tokenizer, template = load_tokenizer(MODEL), load_chat_template(MODEL)
    assert template is not None  # the built-in model has one
    report = worker.report
    scheduler = IterationScheduler(
        SchedulerSettings(max_model_len=report.max_model_len),
        KVLedger(report.num_blocks, report.block_size),
        FirstComeFirstServed(),
    )

    def ask(prompt: str) -> RequestSpec:
        text = template.render([{"role": "user", "content": prompt}])
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        greedy = SamplingParams(temperature=0)
        return RequestSpec(ids, MAX_TOKENS, greedy, end_ids=frozenset(report.eos_token_ids))

    started = time.perf_counter()
    engine = Engine(scheduler, InlineExecutor(worker), time.perf_counter)
    answers = asyncio.run(serve(engine, tokenizer, [ask(prompt) for prompt in prompts]))
    for prompt, said in zip(prompts, answers, strict=True):
        print(f"> {prompt}\n{said}\n")
    seconds = time.perf_counter() - started
    print(f"{len(answers)} answers in {scheduler.num_committed} iterations, {seconds:.2f} s")


if __name__ == "__main__":
    main()
