"""A copy of a checkpoint with a trained vocabulary, as published models have one.

    python -m examples.benchmarks.server.trained_vocabulary CHECKPOINT OUT
    python -m examples.benchmarks.server.trained_vocabulary FILE.gguf OUT.gguf --tokenizer FILE.json

Checkpoints with random weights have few merges, or none that a library of tokenizers takes; these
load faster than real ones. The first form trains 151,643 tokens of byte-level BPE on the texts of
the installed Python packages, in about two CPU minutes; all other files are links. The second form
writes these tokens into a GGUF file.
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import gguf
import orjson
from gguf.constants import GGUFValueType
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from adapters.gguf.vocabulary import CONTROL, NORMAL, UNUSED

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
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, for a GGUF file")
    options = parser.parse_args()
    if options.tokenizer is not None:
        write_gguf(options.checkpoint, options.tokenizer, options.out)
        return
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


def write_gguf(source: Path, tokenizer: Path, out: Path) -> None:
    """A copy of a GGUF file with the vocabulary of a tokenizer.json."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name == "general.architecture":
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    (embedding,) = (each for each in reader.tensors if each.name == "token_embd.weight")
    add_vocabulary(writer, tokenizer, int(embedding.shape[-1]))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Path, num_rows: int) -> None:
    """Add the tokens of a tokenizer.json, and unused ones up to the rows of the embedding."""
    document = orjson.loads(tokenizer.read_bytes())
    tokens, kinds = [f"<unused_{place}>" for place in range(num_rows)], [UNUSED] * num_rows
    for token, place in document["model"]["vocab"].items():
        tokens[place], kinds[place] = token, NORMAL
    for added in document["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in document["model"]["merges"]])
    writer.add_eos_token_id(tokens.index(SPECIAL[2]))


if __name__ == "__main__":
    main()
