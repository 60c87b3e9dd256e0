import asyncio
from itertools import chain, repeat
from typing import Any

import pytest

from engine.policy import POLICIES
from tests.gateway.rig import STEP, TEXT, Rig, Setting, play, played, text

POLICY = "/admin/policy"
NUM_STREAMS = 32
SETTINGS = {
    "starvation_seconds": None,
    "base_quantum": None,
    "quantum_ratio": 2.0,
    "num_levels": 16,
    "skip_join": True,
    "input_weight": 1.0,
    "output_weight": 2.0,
    "fair_keys": False,
    "ttft_goal": 0.0,
}


async def ask(rig: Rig, payload: object = None, headers: dict[str, str] | None = None) -> Any:
    """The status and the answer; a GET without a payload."""
    exchange = (
        rig.client.get(POLICY, headers)
        if payload is None
        else rig.client.post(POLICY, payload, headers)
    )
    async with exchange:
        reply = await exchange.json()
    return exchange.status, reply


async def info(rig: Rig) -> list[str]:
    """The policies that `/metrics` names."""
    lines = (await rig.client.get("/metrics")).content.decode().splitlines()
    return [line for line in lines if line.startswith("podway_policy_info{")]


@played()
async def test_the_policy_is_returned_and_changed_and_metrics_follow(rig: Rig) -> None:
    result = {
        "policy": "fcfs",
        "admission": "grow",
        "policies": list(POLICIES),
        "itl_goal": None,
        "settings": SETTINGS,
    }
    assert await ask(rig) == (200, result)
    assert await info(rig) == ['podway_policy_info{admission="grow",policy="fcfs"} 1.0']
    assert await ask(rig, {"policy": "mlfq"}) == (200, result | {"policy": "mlfq"})
    assert await ask(rig) == (200, result | {"policy": "mlfq"})
    assert await info(rig) == ['podway_policy_info{admission="grow",policy="mlfq"} 1.0']


@played()
async def test_settings_are_changed_with_or_without_the_policy_and_the_others_are_kept(
    rig: Rig,
) -> None:
    slow = {"policy": "mlfq", "starvation_seconds": 30, "num_levels": 4, "skip_join": False}
    _, result = await ask(rig, slow)
    changed = SETTINGS | {"starvation_seconds": 30.0, "num_levels": 4, "skip_join": False}
    assert (result["policy"], result["settings"]) == ("mlfq", changed)
    _, result = await ask(rig, {"policy": "mlfq", "quantum_ratio": 4, "base_quantum": None})
    assert result["settings"] == changed | {"quantum_ratio": 4.0}
    _, result = await ask(rig, {"policy": "fair"})
    assert (result["policy"], result["settings"]) == ("fair", changed | {"quantum_ratio": 4.0})
    assert (await ask(rig))[1] == result


@played()
async def test_a_goal_and_fair_shares_are_set_over_a_policy_and_taken_back(rig: Rig) -> None:
    over = {"policy": "mlfq", "fair_keys": True, "ttft_goal": 2.5}
    _, result = await ask(rig, over)
    changed = SETTINGS | {"fair_keys": True, "ttft_goal": 2.5}
    assert (result["policy"], result["settings"]) == ("mlfq", changed)
    _, result = await ask(rig, {"policy": "mlfq", "fair_keys": False, "ttft_goal": 0})
    assert (result["policy"], result["settings"]) == ("mlfq", SETTINGS)


@played(Setting(policy="fair"))
async def test_switching_to_the_current_policy_changes_nothing(rig: Rig) -> None:
    before = rig.engine.scheduler.policy
    assert (await ask(rig, {"policy": "fair"}))[0] == 200
    assert rig.engine.scheduler.policy is before


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({"policy": "lifo"}, "policy"),
        ({"policy": "srpt"}, "policy"),
        ({"policy": 1}, "policy"),
        ({}, "policy"),
        ({"policy": "mlfq", "ratio": 2}, "ratio"),
        ({"policy": "mlfq", "quantum_ratio": 1}, "quantum_ratio"),
        ({"policy": "mlfq", "starvation_seconds": 0}, "starvation_seconds"),
        ({"policy": "mlfq", "num_levels": 65}, "num_levels"),
        ({"policy": "fair", "output_weight": -1}, "output_weight"),
        ({"policy": "mlfq", "ttft_goal": -1}, "ttft_goal"),
        ({"policy": "mlfq", "levels": 5}, "levels"),
        ({"policy": "mlfq", "fair_keys": "yes"}, "fair_keys"),
        ({"policy": "mlfq", "skip_join": 1}, "skip_join"),
        (b"mlfq", None),
    ],
)
@played()
async def test_an_unknown_policy_is_rejected_and_changes_nothing(
    rig: Rig, payload: object, param: str | None
) -> None:
    before = rig.engine.scheduler.policy
    status, reply = await ask(rig, payload)
    assert (status, reply["error"]["param"]) == (400, param)
    assert rig.engine.scheduler.policy is before


@pytest.mark.parametrize("num_blocks", [1000, 150])
def test_switching_through_all_policies_changes_no_text_of_32_streams(num_blocks: int) -> None:
    """Each policy follows each other one, an iteration apart; with 150 slots memory is short."""
    texts = [f"{index}:" + chr(97 + index % 26) * (10 + index * 7 % 50) for index in range(32)]
    tour = [name for one in POLICIES for other in POLICIES if other != one for name in (one, other)]

    async def scene(rig: Rig) -> None:
        async def listen(index: int) -> str:
            fields = {"priority": index % 3, "deadline_ms": 10_000_000, "cache_salt": str(index)}
            body = text(prompt=f"{index:02}" * 4, stream=True, max_tokens=80, **fields)
            *chunks, done = (await rig.client.post(TEXT, body)).events
            assert done == "DONE"
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        async def switch() -> None:
            for name in chain.from_iterable(repeat(tour)):
                await asyncio.sleep(STEP)
                assert (await ask(rig, {"policy": name}))[0] == 200

        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(listen(index)) for index in range(NUM_STREAMS)]
            switching = group.create_task(switch())
            await asyncio.wait(streams)
            switching.cancel()
        assert [stream.result() for stream in streams] == texts

    rig = play(scene, Setting(texts=texts, num_blocks=num_blocks))
    assert rig.metrics.requests.outcomes["finished"] == NUM_STREAMS
    assert rig.metrics.num_iterations > len(tour)
    assert (rig.metrics.requests.preemptions.total() > 0) is (num_blocks == 150)
