"""Random cases of speculation: what disturbs the requests, and what must stay as it is."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.inline import RequestOutcome


def cases(count: int) -> Callable[[Any], Any]:
    """So many random cases, or as many as the environment says."""
    return settings(
        max_examples=int(os.environ.get("PODWAY_EXAMPLES", count)),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def disturbances(data: st.DataObject, **choices: Sequence[object]) -> dict[str, Any]:
    """Arguments of `play`: workers that die, chunks, and what else there is to choose from."""
    common: dict[str, Sequence[object]] = {
        "dies_in": ((), (3,), (2, 7)),
        "lookahead": (0, 1),
        "max_batch_tokens": (8, 512),
    }
    drawn = {name: data.draw(st.sampled_from(each)) for name, each in (common | choices).items()}
    return {"max_batch_size": 8, **drawn}


def results(outcomes: list[RequestOutcome]) -> list[tuple[Any, ...]]:
    """Tokens and the bits of their log-probabilities."""
    return [
        (one.tokens, one.logprobs, one.prompt_logprobs, one.finish, str(one.error))
        for one in outcomes
    ]
