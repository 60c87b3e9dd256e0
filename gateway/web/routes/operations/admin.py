"""`/admin/policy`: GET returns the scheduling policy and its settings, POST changes them while
serving."""

import logging
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from engine.policy import POLICIES, PolicySettings, build, name_of, settings_of
from engine.policy.estimates.lengths import LearnedLengths
from gateway.access.callers import read_body
from gateway.schema.decoding import check_allowed, check_range, decode
from gateway.service import Service, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

logger = logging.getLogger(__name__)

_FIELDS = {  # of a POST, named as in the settings file: the field of `PolicySettings`
    "starvation_seconds": "starvation_seconds",
    "base_quantum": "base_quantum",
    "quantum_ratio": "ratio",
    "num_levels": "num_levels",
    "skip_join": "skips",
    "min_outputs": "min_outputs",
    "fcfs_slack": "fcfs_slack",
    "input_weight": "input_weight",
    "output_weight": "output_weight",
    "fair_keys": "fair_keys",
    "ttft_goal": "ttft_goal",
}


class PolicyChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a POST: a name of `engine.policy.POLICIES`, and settings to change.

    A setting that is absent or null keeps its value. Seconds and ratios as in the settings file;
    a goal of 0 is none.
    """

    policy: str
    starvation_seconds: float | None = None
    base_quantum: float | None = None
    quantum_ratio: float | None = None
    num_levels: int | None = None
    skip_join: bool | None = None
    min_outputs: int | None = None
    fcfs_slack: float | None = None
    input_weight: float | None = None
    output_weight: float | None = None
    fair_keys: bool | None = None
    ttft_goal: float | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` if the policy is unknown or a setting is out of range."""
        check_allowed(self.policy, "policy", tuple(POLICIES))
        check_range(self.starvation_seconds, "starvation_seconds", 0.001, 1e6)
        check_range(self.base_quantum, "base_quantum", 1e-6, 1e6)
        check_range(self.quantum_ratio, "quantum_ratio", 1.001, 1000.0)
        check_range(self.num_levels, "num_levels", 1, 64)
        check_range(self.min_outputs, "min_outputs", 1, 1_000_000)
        check_range(self.fcfs_slack, "fcfs_slack", 0.0, 1e6)
        check_range(self.input_weight, "input_weight", 0.001, 1e6)
        check_range(self.output_weight, "output_weight", 0.001, 1e6)
        check_range(self.ttft_goal, "ttft_goal", 0.0, 1e6)

    def applied_to(self, settings: PolicySettings) -> PolicySettings:
        """These settings, changed by those that the body has."""
        values = {own: getattr(self, name) for name, own in _FIELDS.items()}
        return replace(settings, **{k: value for k, value in values.items() if value is not None})


async def policy(http: "HttpRequest") -> dict[str, Any]:
    """The current policy with its settings, the admission mode and the policies to choose from.

    Raises `InvalidRequest` for a POST with an unknown policy or a setting that is out of range.
    """
    service = service_of(http)
    if http.method == "POST":
        choice = decode(_DECODER, await read_body(http, service.limits))
        choice.check()
        _switch(service, choice)
    scheduler = service.engine.scheduler
    settings = settings_of(scheduler.policy)
    return {
        "policy": name_of(scheduler.policy),
        "admission": scheduler.settings.admission.value,
        "policies": list(POLICIES),
        "itl_goal": _finite(scheduler.settings.itl_goal),
        "settings": {name: getattr(settings, own) for name, own in _FIELDS.items()},
        "learned_lengths": _learned(service.lengths),
    }


def _finite(seconds: float) -> float | None:
    return None if seconds == inf else seconds


def _learned(lengths: LearnedLengths) -> dict[str, int]:
    """How many outputs have ended by themselves, and percentiles of the lengths of outputs in
    tokens, which also count those that still run or were cut; 0 if none has ended."""
    points = {f"p{round(100 * share)}": lengths.quantile(share) for share in (0.5, 0.9, 0.99)}
    return {"num_observed": lengths.num_observed} | points


def _switch(service: Service, choice: PolicyChoice) -> None:
    """Live requests move to the new policy; without a difference nothing changes."""
    scheduler = service.engine.scheduler
    before = name_of(scheduler.policy)
    settings = choice.applied_to(settings_of(scheduler.policy))
    if choice.policy == before and settings == settings_of(scheduler.policy):
        return
    policy = build(choice.policy, scheduler.cost, settings, lengths=service.lengths)
    service.engine.switch(policy)
    logger.info("policy=%s before=%s live=%d", choice.policy, before, len(scheduler.pool))


_DECODER = msgspec.json.Decoder(PolicyChoice)
