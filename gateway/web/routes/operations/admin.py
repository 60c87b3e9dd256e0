"""`/admin/policy`: GET returns the scheduling policy and its settings, POST changes them while
serving."""

import logging
from collections.abc import Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, cast

import msgspec

from engine.errors import InvalidRequest
from engine.policy import POLICIES, PolicySettings, build, name_of, settings_of
from gateway.options import options_of, with_values
from gateway.schema.decoding import check_allowed, decode
from gateway.service import Service, service_of
from gateway.web.decoded_body import decoded_body

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

logger = logging.getLogger(__name__)

OPTIONS = {option.name: option for option in options_of("policies", PolicySettings())}


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a POST: a name of `engine.policy.POLICIES`, and settings to change.

    They are named as in the settings file; one that is absent or null keeps its value.
    """

    policy: str


PolicyChoice = msgspec.defstruct(
    "PolicyChoice",
    [(name, option.kind | None, None) for name, option in OPTIONS.items()],
    bases=(_Named,),
    namespace={"__doc__": _Named.__doc__},
    forbid_unknown_fields=True,
)


def changes_of(choice: _Named) -> dict[str, object]:
    """The settings to change, by the fields of `PolicySettings`. Raises `InvalidRequest`."""
    changes: dict[str, object] = {}
    for name, option in OPTIONS.items():
        if (value := getattr(choice, name)) is not None:
            try:
                changes[option.field] = option.parse(value)
            except ValueError as error:
                raise InvalidRequest(
                    f"'{name}'{str(error).removeprefix(option.flag)}", name
                ) from None
    return changes


async def policy(http: "HttpRequest") -> dict[str, Any]:
    """The current policy with its settings, the admission mode and the policies to choose from.

    Raises `InvalidRequest` for a POST with an unknown policy or a setting that is out of range.
    """
    service = service_of(http)
    if http.method == "POST":
        choice = await decoded_body(http, partial(decode, cast("type[_Named]", PolicyChoice)))
        check_allowed(choice.policy, "policy", tuple(POLICIES))
        _switch(service, choice.policy, changes_of(choice))
    scheduler = service.engine.scheduler
    settings = settings_of(scheduler.policy)
    return {
        "policy": name_of(scheduler.policy),
        "admission": scheduler.settings.admission.value,
        "policies": list(POLICIES),
        "itl_goal": _finite(scheduler.settings.itl_goal),
        "settings": {name: getattr(settings, option.field) for name, option in OPTIONS.items()},
    }


def _finite(seconds: float) -> float | None:
    return None if seconds == inf else seconds


def _switch(service: Service, name: str, changes: Mapping[str, object]) -> None:
    """Live requests move to the new policy; without a difference nothing changes."""
    scheduler = service.engine.scheduler
    before = name_of(scheduler.policy)
    settings = with_values(settings_of(scheduler.policy), changes)
    if name == before and settings == settings_of(scheduler.policy):
        return
    engines = service.engine.engines
    for engine in engines:
        engine.switch(build(name, engine.scheduler.cost, settings))
    live = sum(len(engine.scheduler.pool) for engine in engines)
    logger.info("policy=%s before=%s live=%d", name, before, live)
