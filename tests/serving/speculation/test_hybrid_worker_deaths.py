"""A whole server of a model with recurrent layers, which speculates and plans ahead: its worker is
killed while requests run, and their texts are those of a server that does neither."""

import asyncio
import os
import shutil
import signal
from importlib.resources import files
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.conftest import read_url, start_server
from tests.models.checkpoints import make_checkpoint
from tests.serving.client import Json, metrics, streamed_text

VOCAB = 2048
NUM_KILLS = 2
DRAFTED = "vllm:spec_decode_num_draft_tokens_total/model_name=builtin"
GENERATED = "vllm:generation_tokens_total/model_name=builtin"


@pytest.fixture(name="checkpoint", scope="module")
def _checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "hybrid"
    directory.mkdir()
    make_checkpoint(directory, "qwen3_5", vocab_size=VOCAB, max_position_embeddings=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(str(files("adapters").joinpath("builtin", name)), directory)
    return directory


def bodies() -> list[Json]:
    return [
        {
            "prompt": f"{number} and {number + 1}, " * (3 + 7 * number),
            "max_tokens": 300,
            "temperature": 0,
            "logit_bias": {"300": 50, "301": 50, "302": 50},  # so that there is something to guess
            "ignore_eos": True,
        }
        for number in range(5)
    ]


async def texts_of(session: aiohttp.ClientSession, url: str) -> list[str]:
    return await asyncio.gather(*(streamed_text(session, url, body) for body in bodies()))


async def test_texts_of_a_hybrid_model_outlive_its_workers_with_drafts_planned_ahead(
    checkpoint: Path, tmp_path: Path
) -> None:
    flags = (
        str(checkpoint),
        "--served-model-name",
        "builtin",
        "--threads",
        "1",
        "--cost-model",
        "none",
    )
    async with aiohttp.ClientSession() as session, asyncio.timeout(240):
        with start_server(tmp_path, *flags) as server:
            expected = await texts_of(session, read_url(server))
        config = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'
        speculating = ("--speculative-config", config, "--lookahead", "1")
        # Prompts and recomputations of several chunks
        chunks = (
            "--max-batch-size",
            "8",
            "--max-batch-tokens",
            "32",
            "--max-restarts",
            str(NUM_KILLS),
        )
        with start_server(tmp_path, *flags, *speculating, *chunks) as server:
            url = read_url(server)
            reading = asyncio.create_task(texts_of(session, url))
            for _ in range(NUM_KILLS):
                before = (await metrics(session, url)).get(GENERATED, 0)
                while (await metrics(session, url)).get(GENERATED, 0) < before + 100:
                    assert not reading.done(), "killed while all of them run"
                (worker,) = psutil.Process(server.pid).children()
                os.kill(worker.pid, signal.SIGKILL)
            assert await reading == expected
            counts = await metrics(session, url)
            assert counts["podway_worker_restarts_total"] == NUM_KILLS
            assert counts[DRAFTED] > 0
