"""One case: a random checkpoint's logits by a worker and by transformers, in random steps."""

from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import Driver, load_worker
from tests.fuzz.models.drawing import Drawn, draw
from tests.models.checkpoints import make_model

TOLERANCE = 1e-4  # for logits of up to `SCALE`
RECURRENT_TOLERANCE = 5e-4
SCALE = 4.0
ROUNDING = 8.0  # times transformers' own error of rounding, where it is larger: some are amplified
NUM_DECODES = 6
CHUNKS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 64)


class Different(Exception):
    """A worker's logits are not transformers', or depend on what else is in the step."""


def play(seed: int, counts: "Counter[str]") -> None:
    """Compare the checkpoint of a seed. Raises `Different`."""
    with TemporaryDirectory() as directory:
        _play(seed, Path(directory), counts)


def _play(seed: int, directory: Path, counts: "Counter[str]") -> None:
    random = Random(seed)
    drawn = draw(random)
    model = _model_of(drawn, seed)
    if model is None:
        counts["not built by transformers"] += 1
        return
    tokens = [random.randrange(drawn.vocab_size) for _ in range(random.choice([8, 20, 50, 110]))]
    model.save_pretrained(directory)
    expected = _logits(model, tokens)
    rounding = _rounding(model, tokens, expected)
    try:
        worker = load_worker(directory, attention="cpu", block_size=random.choice([1, 3, 4, 16]))
    except EngineError:
        counts[f"refused: {drawn.variant}"] += 1
        return
    scale = max(1.0, expected.abs().max().item() / SCALE)
    tolerance = RECURRENT_TOLERANCE if worker.report.num_states else TOLERANCE
    tolerance = max(scale * tolerance, ROUNDING * rounding)
    _compare(worker, tokens, expected, tolerance, random)
    _compare_bits(worker, tokens, random, drawn)
    counts["compared"] += 1
    counts[f"compared: {drawn.variant}"] += 1


def _model_of(drawn: Drawn, seed: int) -> Any:
    """transformers' model; None if it does not accept the configuration."""
    try:
        model = make_model(drawn.variant, seed, **drawn.changes)
        with torch.inference_mode():
            model(torch.tensor([[3, 4, 5]]))
    except Exception:  # of any kind, for configurations that make no sense
        return None
    return model


def _logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def _rounding(model: Any, tokens: list[int], logits: Tensor) -> float:
    """The largest error of transformers' `logits`: the model's in float64 are others, or, where
    layers compute in float32 only, those of half of the tokens."""
    begin = _logits(model, tokens[: len(tokens) // 2])
    model.set_experts_implementation("eager")  # others multiply in float32 at most
    try:
        exact = _logits(model.double(), tokens)
    except RuntimeError:
        exact, logits = begin, logits[: len(begin)]
    return (exact - logits).abs().max().item()


def _compare(
    worker: Worker, tokens: list[int], expected: Tensor, tolerance: float, random: Random
) -> None:
    """A prompt in random pieces, then decodes."""
    driver, done = Driver(worker, random.getrandbits(16)), 0
    while done < len(tokens):
        size = random.choice(CHUNKS) if done < len(tokens) - NUM_DECODES else 1
        size = min(size, max(1, len(tokens) - NUM_DECODES - done))
        logits = driver.logits((0, tokens[done : done + size]))[0]
        done += size
        error = (logits - expected[done - 1]).abs().max().item()
        if not error < tolerance:  # also for NaN
            raise Different(
                f"logits after {done} tokens differ by {error:.3g}, not {tolerance:.3g}"
            )


def _compare_bits(worker: Worker, tokens: list[int], random: Random, drawn: Drawn) -> None:
    """A piece of a prompt and a decode, alone and among others, give the same bits."""
    piece, token = tokens[: random.choice([1, 2, 5, 17])], tokens[-1]
    others = [
        [random.randrange(drawn.vocab_size) for _ in range(random.randint(1, 30))] for _ in range(3)
    ]
    alone, among = Driver(worker, 1), Driver(worker, 2)
    bits = [alone.logits((0, piece))[0].clone(), alone.logits((0, [token]))[0].clone()]
    first = among.logits((1, others[0]), (2, others[1]), (0, piece), (3, others[2]))[2].clone()
    second = among.logits((1, [3]), (0, [token]), (2, [4]), (3, [5]))[1]
    for name, one, other in zip(("a prompt", "a decode"), bits, (first, second), strict=True):
        if not torch.equal(one, other):
            raise Different(f"the bits of {name} depend on what else is in the step")
