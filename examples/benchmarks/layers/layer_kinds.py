"""KV memory of models with sliding windows, and reuse of a chat by a model with recurrent layers.

    python -m examples.benchmarks.layers.layer_kinds memory [--out FILE]
    python -m examples.benchmarks.layers.layer_kinds chat [MODEL] [--out FILE]
    python -m examples.benchmarks.layers.layer_kinds beside FILE.gguf --llama-server PATH
        [--out FILE]

`memory` serves one long request in the scheduler of the server, without a model, and counts the
blocks that it holds at most; the same layers without windows are the comparison. `chat` starts a
server with a prefix cache and one without, and sends the same chat of `TURNS` messages to each;
`beside` sends four kinds of chats to this server and to llama-server: one that continues, one whose
answers come back without their first tokens, as a client sends them without their reasoning, two
chats in turns, and chats with a common beginning.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx

from adapters.models import FAMILIES
from adapters.models.named_shapes import SHAPES
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import RequestSpec
from engine.step import SamplingParams, StepResult
from engine.worker.model.kv.kv_groups import KVGroups
from engine.worker.ports import ModelFamily, ModelShape
from engine.worker.weights.checkpoint import load_by_name
from examples.benchmarks.cluster.routers import free_port
from examples.benchmarks.server.disk_tier import Reply, Server

CONTEXT, ANSWER, CHUNK, SIZE = 32_768, 64, 512, 16
KV_BYTES = 2  # of a number: bfloat16
WINDOWED: Mapping[str, Mapping[str, object]] = {
    "Gemma-3-270M": {},
    "Gemma-3-1B": {},
    "gpt-oss-20b": {},
    "Mistral-7B": {"sliding_window": 4096},  # as in version 0.1
}
TURNS, QUESTION_TOKENS, ANSWER_TOKENS = 8, 100, 24
MODEL_LEN = 4096


def shape_of(name: str, changes: Mapping[str, object]) -> ModelShape:
    config = {**SHAPES[name], **changes}
    architectures = config["architectures"]
    assert isinstance(architectures, list), "a list of names"
    family: Any = load_by_name(FAMILIES[architectures[0]])
    read: ModelFamily = family(config)
    return read.shape


def most_blocks(windows: Sequence[int | None]) -> int:
    """The most blocks that a request of `CONTEXT` tokens holds."""
    settings = SchedulerSettings(
        max_model_len=CONTEXT + ANSWER, max_batch_size=1, max_batch_tokens=CHUNK
    )
    blocks = len(windows) * (CONTEXT + ANSWER) // SIZE
    ledger = KVLedger(KVShape(blocks, SIZE, windows=tuple(windows), chunk=CHUNK))
    scheduler = IterationScheduler(settings, ledger, FirstComeFirstServed())
    scheduler.add(RequestSpec((1,) * CONTEXT, ANSWER, SamplingParams()), 0.0)
    most = 0
    while (iteration := scheduler.plan(0.0)) is not None:
        most = max(most, ledger.num_held)
        samples = sum(entry.sample is not None for entry in iteration.step.entries)
        result = StepResult(iteration.step.step_id, (5,) * samples, 0.01)
        scheduler.commit(iteration, result, 0.0)
    return most


def memory_of(name: str, changes: Mapping[str, object]) -> dict[str, Any]:
    shape = shape_of(name, changes)
    layer_bytes = 2 * SIZE * shape.num_kv_heads * shape.head_dim * KV_BYTES
    groups = KVGroups.of(shape)
    layers = 1 + max(groups.tensors(range(shape.num_layers)))
    whole = KVGroups.of(replace(shape, attention=()))
    mib = most_blocks(groups.windows) * layers * layer_bytes / 2**20
    without = most_blocks(whole.windows) * shape.num_layers * layer_bytes / 2**20
    return {
        "windows": list(groups.windows),
        "layers_per_group": layers,
        "mib": mib,
        "mib_without_windows": without,
        "ratio": without / mib,
    }


def memory() -> dict[str, Any]:
    models = {name: memory_of(name, changes) for name, changes in WINDOWED.items()}
    return {"context": CONTEXT, "chunk": CHUNK, "block_size": SIZE, "models": models}


def talk(server: Server, answers: list[list[int]]) -> list[dict[str, Any]]:
    """The chat's turns: TTFT in seconds, prompt and cached tokens. The answers of the first chat
    are the history of all others, so that both servers get the same prompts."""
    random, history, turns = Random(0), [], []
    for number in range(TURNS):
        history += random.choices(range(1000, 30_000), k=QUESTION_TOKENS)
        reply = server.complete(history, ANSWER_TOKENS)
        if len(answers) == number:
            answers.append(reply.token_ids)
        history = history + answers[number]
        turns.append({key: value for key, value in reply._asdict().items() if key != "token_ids"})
    return turns


class LlamaServer:
    """llama-server with one slot, ready for requests."""

    def __init__(self, program: str, model: str) -> None:
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        limits = ("-c", str(MODEL_LEN), "--parallel", "1", "-t", "1")
        command = [program, "-m", model, "--host", "127.0.0.1", "--port", port, *limits]
        output = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=output, stderr=output)
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    break
            time.sleep(0.1)

    def complete(self, prompt: str | list[int], max_tokens: int) -> Reply:
        """The greedy completion of a prompt."""
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0.0, "ignore_eos": True}
        body |= {"cache_prompt": True, "return_tokens": True}
        reply = httpx.post(f"{self.url}/completion", json=body, timeout=120).json()
        timings = reply["timings"]
        cached, computed = timings["cache_n"], timings["prompt_n"]
        return Reply(timings["prompt_ms"] / 1e3, cached + computed, cached, reply["tokens"])

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def shares(turns: Sequence[Mapping[str, Any]]) -> float:
    """The share of the prompts' tokens from the second turn on that were computed."""
    total = sum(turn["prompt_tokens"] for turn in turns[1:])
    return 1 - float(sum(turn["cached_tokens"] for turn in turns[1:]) / total)


class ChatKind(NamedTuple):
    """How many chats take turns, the tokens with which all of them begin, and the tokens left out
    of each answer in the history."""

    chats: int = 1
    turns: int = TURNS  # of each chat
    system: int = 0
    left_out: int = 0
    seed: int = 0  # chats of different kinds share no prefix


KINDS = {
    "continued": ChatKind(seed=1),
    "answers shortened": ChatKind(left_out=8, seed=2),
    "two in turns": ChatKind(chats=2, seed=3),
    "a common beginning": ChatKind(chats=8, turns=1, system=400, seed=4),
}


def computed(server: Server | LlamaServer, kind: ChatKind, answers: list[list[int]]) -> list[int]:
    """The prompt tokens that the server computed in each turn; `answers` as in `talk`."""
    random, found = Random(kind.seed), []
    system = random.choices(range(1000, 30_000), k=kind.system)
    histories = [system.copy() for _ in range(kind.chats)]
    for number in range(kind.turns * kind.chats):
        history = histories[number % kind.chats]
        history += random.choices(range(1000, 30_000), k=QUESTION_TOKENS)
        reply = server.complete(history, ANSWER_TOKENS)
        if len(answers) == number:
            answers.append(reply.token_ids)
        history += answers[number][kind.left_out :]
        found.append(reply.prompt_tokens - reply.cached_tokens)
    return found


def beside(model: str, llama_server: str) -> dict[str, Any]:
    """Tokens computed by both servers, one after the other, for the same chats."""
    found: dict[str, Any] = {"model": Path(model).name, "load": os.getloadavg()[0], "chats": {}}
    answers: dict[str, list[list[int]]] = {name: [] for name in KINDS}
    server: Server | LlamaServer
    server = Server(model, "--max-model-len", str(MODEL_LEN), "--cost-model", "none")
    own = {name: computed(server, kind, answers[name]) for name, kind in KINDS.items()}
    server.end()
    server = LlamaServer(llama_server, model)
    other = {name: computed(server, kind, answers[name]) for name, kind in KINDS.items()}
    server.end()
    for name, kind in KINDS.items():
        turn = QUESTION_TOKENS + ANSWER_TOKENS - kind.left_out
        first, calls = kind.system + QUESTION_TOKENS, range(kind.turns * kind.chats)
        lengths = [first + n // kind.chats * turn for n in calls]
        found["chats"][name] = {"prompt": lengths, "podway": own[name], "llama_server": other[name]}
    return found


def chat(model: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model": model, "load": os.getloadavg()[0]}
    answers: list[list[int]] = []
    for name, flags in (("cached", ()), ("uncached", ("--no-prefix-cache",))):
        server = Server(model, "--max-model-len", str(MODEL_LEN), "--cost-model", "none", *flags)
        found[name] = talk(server, answers)
        server.end()
    total = sum(turn["prompt_tokens"] for turn in found["cached"][1:])
    found["share_computed"] = shares(found["cached"])
    found["share_new"] = QUESTION_TOKENS * (TURNS - 1) / total
    last = TURNS - 1
    found["ttft_ratio"] = found["uncached"][last]["ttft"] / found["cached"][last]["ttft"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=["memory", "chat", "beside"])
    parser.add_argument("model", nargs="?", default="random:Qwen3.5-0.8B")
    parser.add_argument("--out", type=Path, default=Path("layer_kinds.json"))
    parser.add_argument(
        "--llama-server", metavar="PATH", help="its program", default="llama-server"
    )
    arguments = parser.parse_args()
    match arguments.what:
        case "memory":
            found = memory()
        case "chat":
            found = chat(arguments.model)
        case _:
            found = beside(arguments.model, arguments.llama_server)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
