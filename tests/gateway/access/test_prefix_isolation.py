import asyncio
from pathlib import Path

import pytest

from tests.gateway.forms import a_line, started
from tests.gateway.rig import TEXT, Rig, Setting, play, played, text

PROMPT = "a prompt that both keys send, long enough for some blocks"
KEYS = ("alice=k1", "bob=k2")


async def cached_tokens(rig: Rig, key: str, **fields: object) -> int:
    """What the response says of a prompt's cached tokens."""
    headers = {"x-api-key": key}
    reply = await rig.client.post(TEXT, text(prompt=PROMPT, max_tokens=1, **fields), headers)
    usage = reply.json["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@played(Setting(keys=KEYS))
async def test_a_key_does_not_learn_what_another_one_sent(rig: Rig) -> None:
    assert await cached_tokens(rig, "k1") == 0
    assert await cached_tokens(rig, "k2") == 0
    assert await cached_tokens(rig, "k1") > 0
    assert await cached_tokens(rig, "k2") > 0


@played(Setting(keys=KEYS, isolates_prefixes=False))
async def test_without_isolation_keys_share_prefixes(rig: Rig) -> None:
    assert await cached_tokens(rig, "k1") == 0
    assert await cached_tokens(rig, "k2") > 0


@played()
async def test_an_open_server_shares_prefixes(rig: Rig) -> None:
    assert await cached_tokens(rig, "") == 0
    assert await cached_tokens(rig, "") > 0


@pytest.mark.parametrize("isolates", [True, False])
def test_the_key_file_decides_per_key(tmp_path: Path, isolates: bool) -> None:
    path = tmp_path / "keys.toml"
    entries = (("a", False), ("b", False), ("c", True), ("d", True))
    path.write_text(
        "\n".join(
            f'[{name}]\nkey = "{name}"\nprefix_isolation = {str(own).lower()}'
            for name, own in entries
        )
    )

    async def scene(rig: Rig) -> None:
        found = [await cached_tokens(rig, name) > 0 for name, _ in entries]
        assert found == [False, True, False, False]

    play(scene, Setting(key_file=path, isolates_prefixes=isolates))


def test_a_cache_salt_cannot_name_another_keys_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[shared]\nkey = "s"\nprefix_isolation = false\n[alice]\nkey = "k"')

    async def scene(rig: Rig) -> None:
        assert await cached_tokens(rig, "k") == 0
        assert await cached_tokens(rig, "k", cache_salt="x") == 0
        for salt in ("alice", "alicex", "5:alice", "5:alicex", "0:5:alice", "x"):
            assert await cached_tokens(rig, "s", cache_salt=salt) == 0

    play(scene, Setting(key_file=path))


@played(Setting(keys=KEYS))
async def test_lines_of_a_batch_share_the_prefixes_of_their_key(rig: Rig) -> None:
    body = text(prompt=PROMPT, max_tokens=1)
    found: list[bool] = []
    assert await cached_tokens(rig, "k1") == 0
    for name, key in (("alice", "k1"), ("bob", "k2")):
        line = a_line("1", body, TEXT)
        batch_id = await started(rig, line, {"x-api-key": key}, endpoint=TEXT)
        batches = rig.service.store.batch_queue.batches
        await asyncio.sleep(3600)
        batch = await batches.find(batch_id, name)
        assert batch.status == "completed"
        found.append(batch.tokens.cached > 0)
    assert found == [True, False]
