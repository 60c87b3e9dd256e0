from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, STEP, Rig, Setting, chat, played

TIMING = {"x-podway-timing": "1"}


def timing_of(headers: dict[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in headers.items() if name.startswith("x-podway-")}


def test_a_response_has_the_milliseconds_of_each_phase() -> None:
    answer = answer_to(CHAT, chat(), Setting(texts=("hello",)), TIMING)
    tokens = answer.json["usage"]["completion_tokens"]
    timing = timing_of(dict(answer.headers))
    step = STEP * 1e3
    assert timing["x-podway-queued-ms"] == 0.0
    assert timing["x-podway-prefill-ms"] == step
    assert timing["x-podway-decode-ms"] == (tokens - 1) * step


@played()
async def test_without_the_request_header_there_are_none(rig: Rig) -> None:
    exchange = await rig.client.post(CHAT, chat())
    assert timing_of(dict(exchange.headers)) == {}
