"""Models that read images beside transformers, in figures.

python -m tests.models.image_equality > adapters/models/IMAGES.md
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.control.images import RopePositions
from engine.request import RequestSpec
from engine.step import SamplingParams
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import EncoderPixels, Encoding
from engine.worker.process.worker import Worker
from engine.worker.weights.checkpoint import Checkpoint
from examples.benchmarks.attacks.report import table_head
from examples.benchmarks.peers.random_mmproj import KINDS
from tests.engine.worker.process.driving import load_worker
from tests.inline import play
from tests.models.images import (
    IMAGE_ID,
    VARIANTS,
    Picture,
    Prompt,
    make_checkpoint,
    make_model,
    picture,
)
from tests.models.mmproj_files import Mmproj

NO_IMAGES = ((IMAGE_ID, -100.0), (IMAGE_ID + 1, -100.0))  # transformers reads them as images
WHOLE = 37  # tokens of the largest image beside two decodes
MAX_TOKENS = (3, 64)  # of an iteration
GREEDY = SamplingParams(temperature=0.0, logit_bias=NO_IMAGES)
HEAD = """# Models that read images, beside transformers

`python -m tests.models.image_equality`: tiny random models of each family, every parameter random,
in float32. Four prompts with one or two images, and one with none, are computed in iterations of
at most 3 and of at most 64 tokens, three requests at a time, and 12 tokens of output follow each.
All positions and all greedy tokens are equal; the other columns have the largest difference.
`tests/adapters/models/test_images.py` bounds them, and `tests/adapters/gguf/test_mmproj.py` those
of GGUF files (mmproj), here with weights in float32.
"""
COLUMNS = (
    "family",
    "numbers of the encoder's outputs",
    "of size up to",
    "largest difference",
    "positions of RoPE",
    "log-probabilities",
    "largest difference",
    "greedy tokens",
)


@dataclass
class Compared:
    """How many numbers were compared, and how far apart they were at most."""

    count: int = 0
    largest: float = 0.0
    most: float = 0.0  # the largest expected number

    def add(self, found: Tensor, expected: Tensor) -> None:
        assert found.shape == expected.shape
        self.count += found.numel()
        if found.numel():
            self.largest = max(self.largest, (found - expected).abs().max().item())
            self.most = max(self.most, expected.abs().max().item())


@dataclass
class Family:
    """The same weights in transformers and here."""

    model: Any
    checkpoint: Checkpoint
    worker: Worker | None = None
    outputs: Compared = field(default_factory=Compared)
    positions: Compared = field(default_factory=Compared)
    scores: Compared = field(default_factory=Compared)

    def compare_encodings(self, prompt: Prompt) -> None:
        """What transformers' decoder reads in the places of images, and their positions."""
        seen: dict[str, Any] = {}
        inner = self.model.model
        decoder = getattr(inner, "language_model", None) or inner.text_model
        hook = decoder.register_forward_pre_hook(
            lambda _module, _args, given: seen.update(given), with_kwargs=True
        )
        prompt.expected(self.model)
        hook.remove()
        encodings = [encoded(self.checkpoint, each) for each in prompt.pictures]
        places = torch.tensor(prompt.tokens) == IMAGE_ID
        expected = [seen["inputs_embeds"][0][places], *seen.get("deepstack_visual_embeds", ())]
        for parts, one in zip(zip(*map(_parts, encodings), strict=True), expected, strict=True):
            self.outputs.add(torch.cat(parts), one)
        assert self.checkpoint.encoder is not None
        if self.checkpoint.encoder.merge:
            own = RopePositions.of(prompt.media, self.checkpoint.encoder.merge)
            data = own.between(0, len(prompt.tokens))
            found = torch.from_numpy(np.frombuffer(data, "<i4").copy()).view(3, -1)
            self.positions.add(found, seen["position_ids"][:, 0].int())

    def compare_outputs(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        """Greedy tokens, which must be equal, and their log-probabilities."""
        specs = [
            RequestSpec(each.tokens, 12, GREEDY, media=each.media, logprobs=0) for each in prompts
        ]
        assert self.worker is not None
        assert self.worker.report.encoder is not None
        if self.worker.report.encoder.is_whole:
            max_tokens = max(max_tokens, WHOLE)
        outcomes = play(self.worker, specs, max_batch_size=3, max_batch_tokens=max_tokens)
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.error is None
            output = tuple(outcome.tokens)
            logits = prompt.expected(self.model, output[:-1])[len(prompt.tokens) - 1 :]
            scores = torch.log_softmax(logits, -1)
            logits[:, IMAGE_ID : IMAGE_ID + 2] -= 100.0
            assert output == tuple(logits.argmax(-1).tolist())
            expected = scores.gather(1, torch.tensor(output)[:, None])[:, 0]
            self.scores.add(torch.tensor([each.logprob for each in outcome.logprobs]), expected)

    def compare(self, variant: str) -> None:
        """All prompts of a variant."""
        every = prompts(variant)
        for prompt in every:
            if prompt.media:
                self.compare_encodings(prompt)
        for max_tokens in MAX_TOKENS:
            self.compare_outputs(every, max_tokens)

    def row(self, name: str) -> str:
        outputs, scores = self.outputs, self.scores
        cells = (
            name, f"{outputs.count:,}", f"{outputs.most:.1f}", f"{outputs.largest:.1e}",
            f"{self.positions.count:,}" if self.positions.count else "as text",
            f"{scores.count:,}", f"{scores.largest:.1e}", f"{scores.count:,}",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def prompts(variant: str) -> list[Prompt]:
    """Text around one image and several."""
    some, other = picture(variant, 4, 6), picture(variant, 6, 4, seed=1)
    return [
        Prompt.of([5, 6, 92], some, [93, 7, 8]),
        Prompt.of(other, [9], some, [10, 11, 12]),
        Prompt.of([1, 2, 3, 4, 5, 6, 7], picture(variant, 2, 2, seed=2), [8]),
        Prompt.of([16, 17], picture(variant, 10, 14, seed=3), [18, 19]),  # in several tiles
        Prompt.of([12, 13, 14, 15]),
    ]


def encoded(checkpoint: Checkpoint, image: Picture) -> Encoding:
    """The encoding of an image by the checkpoint's encoder."""
    weights = checkpoint.open_weights(torch.float32, lambda *_: None)
    encoder, media = checkpoint.build_encoder(weights, TorchOperators()), image.media(0)
    assert encoder is not None
    assert checkpoint.encoder is not None
    pixels = EncoderPixels(*map(torch.from_numpy, media.pixels))
    state = encoder.begin(pixels, media.grid)
    for number in range(checkpoint.encoder.num_slices(media.num_patches)):
        encoder.run_slice(state, number)
    return encoder.end(state)


def _parts(encoding: Encoding) -> tuple[Tensor, ...]:
    return (encoding.embeddings, *encoding.added)


def families(folder: Path) -> Iterator[tuple[str, str, Family]]:
    """The name, the variant, and the weights of each."""
    for variant in VARIANTS:
        path = make_checkpoint(folder / variant, variant)
        yield (
            variant,
            variant,
            Family(make_model(variant), Checkpoint.open(str(path)), _worker(path)),
        )
    for variant in KINDS:
        text, mmproj = folder / f"{variant}.gguf", folder / f"mmproj-{variant}.gguf"
        model = Mmproj(variant).write(text, mmproj)
        checkpoint = Checkpoint.open(str(text), mmproj=str(mmproj))
        yield f"mmproj: {variant}", variant, Family(model, checkpoint, _worker(text, mmproj))


def _worker(model: Path, mmproj: Path | None = None) -> Worker:
    more = {} if mmproj is None else {"mmproj": str(mmproj)}
    return load_worker(model, attention="cpu", weights="float32", dtype="float32", **more)


def main() -> None:
    torch.set_num_threads(1)
    lines = [HEAD, table_head(COLUMNS)]
    with tempfile.TemporaryDirectory() as folder:
        for name, variant, family in families(Path(folder)):
            family.compare(variant)
            lines.append(family.row(name))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
