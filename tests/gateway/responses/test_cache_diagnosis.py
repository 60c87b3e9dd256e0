"""`comparison_response_id`: where a prompt leaves that of an earlier response; and prewarming.

In the rig a token is a byte, a block has one token, and a message is rendered as `role:content\\n`.
"""

from typing import Any

from gateway.schema.rendering import Usage
from gateway.schema.responses.diagnosis import CacheDiagnosis
from tests.gateway.responses.asking import PATH
from tests.gateway.rig import MODEL, Rig, Setting, play, played

TWICE = Setting(texts=("Hello!", "Bye!"))


def item(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


async def respond(rig: Rig, given: Any, **fields: Any) -> Any:
    return (await rig.client.post(PATH, {"model": MODEL, "input": given, **fields})).json


def diagnosed(
    first: tuple[Any, dict[str, Any]], second: tuple[Any, dict[str, Any]], setting: Setting = TWICE
) -> Any:
    """The diagnostics of the second response, compared with the first."""
    found: list[Any] = []

    async def scene(rig: Rig) -> None:
        earlier = await respond(rig, first[0], **first[1])
        options = {"comparison_response_id": earlier["id"]}
        body = await respond(rig, second[0], **second[1], prompt_cache_options=options)
        found.append(body["prompt_cache_diagnostics"])

    play(scene, setting)
    return found[0]


ONE = [item("user", "one"), item("assistant", "two"), item("user", "three")]


def test_a_conversation_that_goes_on_is_a_hit() -> None:
    more = [*ONE, item("assistant", "four"), item("user", "five")]
    assert diagnosed((ONE, {}), (more, {})) == {"type": "cache_hit"}


def test_the_first_message_that_differs_is_named() -> None:
    changed = [ONE[0], item("assistant", "2"), ONE[2]]
    reusable = len("system:Be brief.\nuser:one")
    prompt = len("system:Be brief.\nuser:one\nassistant:2\nuser:three\n")
    fields = {"instructions": "Be brief."}
    assert diagnosed((ONE, fields), (changed, fields)) == {
        "type": "cache_miss",
        "reason": "input_changed",
        "cache_missed_tokens": prompt - reusable,
        "comparison_reusable_tokens": reusable,
        "message": 2,
    }
    other = diagnosed((ONE, fields), (ONE, {"instructions": "Be long."}))
    assert (other["reason"], other["message"], other["comparison_reusable_tokens"]) == (
        "input_changed",
        0,
        0,
    )


def test_changed_settings_are_named() -> None:
    earlier = {"model": "m", "tools": [], "reasoning": {"effort": None}}
    for changed, reason in (
        ({"model": "other"}, "model_changed"),
        ({"tools": [{"type": "function"}]}, "tools_changed"),
        ({"reasoning": {"effort": "low"}}, "reasoning_effort_changed"),
    ):
        diagnosis = CacheDiagnosis.of(earlier, earlier | changed, ONE, ONE)
        diagnosis.note((10, 20, 30))
        assert diagnosis.as_json(Usage(40, 1, 0)) == {
            "type": "cache_miss",
            "reason": reason,
            "cache_missed_tokens": 40,
            "comparison_reusable_tokens": 0,
        }


def test_what_was_not_cached_any_more_is_no_hit() -> None:
    off = Setting(prefix_cache=False)
    assert diagnosed((ONE, {}), (ONE, {}), off) == {"type": "unavailable"}


@played()
async def test_an_unknown_response_is_not_found(rig: Rig) -> None:
    body = await respond(rig, "hi", prompt_cache_options={"comparison_response_id": "resp_0"})
    assert body["status"] == "completed"
    assert body["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


@played()
async def test_a_prewarmed_response_has_no_output(rig: Rig) -> None:
    body = await respond(rig, "hi", prompt_cache_options={"prewarm": True})
    assert (body["status"], body["output"]) == ("completed", [])
    assert body["usage"]["output_tokens"] == 0
    assert body["usage"]["input_tokens_details"]["cache_write_tokens"] == 8
    body = await respond(rig, "hi")
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 7
