import pytest

from tests.gateway.answers import answer_to
from tests.gateway.anthropic.test_messages import PATH, ask


@pytest.mark.parametrize(
    ("control", "says"),
    [
        (7, "'cache_control': expected an object"),
        ({"type": "e"}, "'cache_control.type'"),
        ({"ttl": "1h"}, "'cache_control.type'"),
        ({"type": "ephemeral", "ttl": "2h"}, "'cache_control.ttl'"),
    ],
)
def test_a_cache_control_of_another_kind_is_refused(control: object, says: str) -> None:
    answer = answer_to(PATH, ask(cache_control=control))
    assert answer.status == 400
    assert says in answer.json["error"]["message"]
