"""`/admin/policy`: GET returns the scheduling policy, POST changes it while serving."""

import logging
from typing import TYPE_CHECKING

import msgspec
import orjson

from engine.policy import POLICIES, build, name_of
from gateway.access.callers import read_body
from gateway.generation.reply import json_response
from gateway.schema.decoding import check_allowed, decode
from gateway.service import Service, caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

logger = logging.getLogger(__name__)


class PolicyChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a POST: a name of `engine.policy.POLICIES`."""

    policy: str


async def policy(http: "HttpRequest") -> "Response":
    """The current policy, the admission mode and the policies to choose from.

    Raises `InvalidRequest` for a POST with an unknown policy.
    """
    service = service_of(http)
    if http.method == "POST":
        choice = decode(_DECODER, await read_body(http, service.limits))
        check_allowed(choice.policy, "policy", tuple(POLICIES))
        _switch(service, choice.policy)
    scheduler = service.engine.scheduler
    body = {
        "policy": name_of(scheduler.policy),
        "admission": scheduler.settings.admission.value,
        "policies": list(POLICIES),
    }
    return json_response(orjson.dumps(body), caller_of(http), service.clock)


def _switch(service: Service, name: str) -> None:
    """Live requests move to the new policy; switching to the current one changes nothing."""
    scheduler = service.engine.scheduler
    before = name_of(scheduler.policy)
    if name == before:
        return
    service.engine.switch(build(name, scheduler.cost, service.policies))
    logger.info("policy=%s before=%s live=%d", name, before, len(scheduler.pool))


_DECODER = msgspec.json.Decoder(PolicyChoice)
