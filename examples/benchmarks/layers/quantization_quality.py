"""What quantized weights or KV cost in quality: both models read the same texts.

Prints the Kullback-Leibler divergence from float32 in nats per token, the share of tokens for which
both models have the same most likely token, and the largest difference of a logit. The float32
model generates the texts greedily.

    python -m examples.benchmarks.layers.quantization_quality
        [MODEL] [--weights int8] [--activation-bits auto]
        [--kv-cache-dtype float32] [--texts 50] [--tokens 64] [--original MODEL] [--json FILE]
"""

import argparse
import importlib.resources
import json
from array import array
from pathlib import Path
from random import Random

import torch

from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId
from engine.worker.process.worker import Worker
from engine.worker_settings import Kernels, KVSettings, WorkerSettings

BLOCK = 16
GREEDY = SampleSpec(SamplingParams(temperature=0.0))
QUESTIONS = (
    "Hello!",
    "What is 17 + 25?",
    "What is the capital of France?",
    "Tell me a story about a fox.",
    "What is a prefill?",
    "Count from 3 to 9.",
    "Who are you?",
    "What is Podway?",
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    builtin = importlib.resources.files("adapters") / "builtin"
    parser.add_argument("model", nargs="?", default=str(builtin), help="a checkpoint")
    parser.add_argument("--original", help="what the model was made from; else itself in float32")
    parser.add_argument("--weights", default="int8", help="compared with float32")
    parser.add_argument("--kv-cache-dtype", default="float32", help="compared with float32")
    parser.add_argument("--activation-bits", default="auto", help="of int8 weights: 8 or 14")
    parser.add_argument("--texts", type=int, default=50, help="prompts of random ids")
    parser.add_argument("--tokens", type=int, default=64, help="after each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--label", default="run", help="their name in the file")
    return parser.parse_args()


def load(model: str, weights: str, kv_dtype: str, num_slots: int, bits: str = "auto") -> Worker:
    settings = WorkerSettings(
        model=model,
        kernels=Kernels(weights=weights, activation_bits=bits),
        kv=KVSettings(kv_cache_dtype=kv_dtype, kv_slots=num_slots, block_size=BLOCK),
    )
    return Worker.load(settings, lambda what, done, total: None)


def prompts(options: argparse.Namespace, vocab_size: int) -> list[tuple[int, ...]]:
    """Questions that the built-in model knows, or random ids for any other model."""
    if (options.original or options.model).endswith("builtin"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.original or options.model)
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [
            tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
            for chat in chats
        ]
    random = Random(options.seed)
    return [tuple(random.choices(range(vocab_size), k=32)) for _ in range(options.texts)]


def step(number: int, batch: list[tuple[int, tuple[int, ...]]], blocks: int) -> Step:
    """One step for all texts: `batch` has the position and the new tokens of each."""
    entries = []
    for place, (start, tokens) in enumerate(batch):
        table = array("i", range(place * blocks, (place + 1) * blocks)).tobytes()
        entries.append(StepEntry(RequestId(place), start, tokens, table, GREEDY))
    return Step(StepId(number), tuple(entries))


def main() -> None:
    options = parse()
    longest = 256 + options.tokens
    blocks = -(-longest // BLOCK)
    num_slots = max(options.texts, len(QUESTIONS)) * blocks * BLOCK
    exact = load(options.original or options.model, "float32", "float32", num_slots)
    formats = (options.weights, options.kv_cache_dtype, num_slots, options.activation_bits)
    quantized = load(options.model, *formats)
    batch = [(0, prompt) for prompt in prompts(options, exact.report.vocab_size)]
    divergence: list[torch.Tensor] = []
    agreed: list[torch.Tensor] = []
    farthest = 0.0
    for number in range(options.tokens):
        now = step(number, batch, blocks)
        logits, others = exact.logits(now), quantized.logits(now)
        assert logits is not None  # the only stage
        assert others is not None
        farthest = max(farthest, float((logits - others).abs().max()))
        truth, found = logits.log_softmax(-1), others.log_softmax(-1)
        divergence.append((truth.exp() * (truth - found)).sum(-1))
        agreed.append(truth.argmax(-1) == found.argmax(-1))
        batch = [
            (start + len(tokens), (int(token),))
            for (start, tokens), token in zip(batch, truth.argmax(-1), strict=True)
        ]
    nats = torch.cat(divergence).double()
    same = float(torch.cat(agreed).double().mean())
    mean, p99 = float(nats.mean()), float(nats.quantile(0.99))
    print(f"tokens compared      {len(nats)}")
    print(f"divergence, mean     {mean:.2e} nats")
    print(f"divergence, p99      {p99:.2e} nats")
    print(f"same likeliest token {same:.2%}")
    print(f"largest difference   {farthest:.2e} of a logit")
    if options.json:
        rows = json.loads(options.json.read_text()) if options.json.exists() else {}
        row = {"tokens": len(nats), "mean": mean, "p99": p99, "same": same, "largest": farthest}
        rows[options.label] = row
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
