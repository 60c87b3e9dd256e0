"""A copy of a checkpoint with a trained vocabulary, as published models have one.

    python -m examples.benchmarks.server.trained_vocabulary CHECKPOINT OUT

Checkpoints with random weights have a list of few merges, which loads faster than a real one. This
trains 151,643 tokens of byte-level BPE on the texts of the installed Python packages in about two
CPU minutes; all other files are links.
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 151_643  # Qwen 2's, without special tokens
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MAX_CHARS = 40  # of a token
# Qwen 2's expression
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    for path in options.checkpoint.iterdir():
        if path.name != "tokenizer.json":
            (options.out / path.name).symlink_to(path.resolve())
    tokenizer = trained(texts(Path(sysconfig.get_path("purelib"))), VOCAB_SIZE)
    tokenizer.save(str(options.out / "tokenizer.json"))
    print(f"{tokenizer.get_vocab_size()} tokens")


def texts(folder: Path) -> Iterator[str]:
    """The sources and notes under a folder."""
    for suffix in ("py", "md", "txt", "rst", "json", "h"):
        for path in sorted(folder.rglob(f"*.{suffix}")):
            yield path.read_text(errors="ignore")


def trained(corpus: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=MAX_CHARS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


if __name__ == "__main__":
    main()
