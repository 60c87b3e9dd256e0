"""Policies by name; those under research are for simulation only."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import cast

from engine.policy.base import BackgroundLast, MultiLevel, Policy
from engine.policy.fair import VirtualTokenCounter
from engine.policy.goodput import GoodputFirst
from engine.policy.settings import PolicySettings
from engine.ports import Cost

POLICIES: dict[str, str] = {
    "fcfs": "engine.policy.fcfs:FirstComeFirstServed",
    "mlfq": "engine.policy.mlfq:SkipJoinMLFQ",
    "priority": "engine.policy.priority:LowestPriorityFirst",
    "fair": "engine.policy.fair:VirtualTokenCounter",
    "deadline": "engine.policy.deadline:EarliestFeasibleFirst",
}
RESEARCH: dict[str, str] = {"srpt": "engine.research.policies.srpt:ShortestRemainingFirst"}


def build(
    name: str, cost: Cost, settings: PolicySettings | None = None, *, serves: bool = True
) -> Policy:
    """An empty policy of that name, with the TTFT goal and the fair shares of the settings over it,
    behind which background requests are ordered.

    ValueError if there is no such policy, or if it is research and `serves` is True.
    """
    known = POLICIES if serves else POLICIES | RESEARCH
    if name not in known:
        reason = " (simulation only)" if name in RESEARCH else ""
        raise ValueError(f"policy must be one of {', '.join(known)}, not {name!r}{reason}")
    settings = settings or PolicySettings()
    first = _make(known[name], cost, settings)
    policy, another = first, partial(_make, known[name], cost, settings)
    if settings.ttft_goal > 0.0:
        policy = GoodputFirst(first, another(), cost, settings)
        another = partial(_within_goal, another, cost, settings)
    if settings.fair_keys and name != "fair":
        policy = VirtualTokenCounter(cost, settings, another)
    return BackgroundLast(policy, settings, first)


def _make(target: str, cost: Cost, settings: PolicySettings) -> Policy:
    module, _, kind = target.partition(":")
    return cast("Policy", getattr(import_module(module), kind)(cost, settings))


def _within_goal(another: Callable[[], Policy], cost: Cost, settings: PolicySettings) -> Policy:
    return GoodputFirst(another(), another(), cost, settings)


def name_of(policy: Policy) -> str:
    """The policy's name in the tables; its class name if it is in none."""
    kind = type(policy.base if isinstance(policy, BackgroundLast) else policy)
    target = f"{kind.__module__}:{kind.__qualname__}"
    names = (name for name, known in (POLICIES | RESEARCH).items() if known == target)
    return next(names, kind.__name__)


def settings_of(policy: Policy) -> PolicySettings:
    """The settings with which `build` made the policy; the defaults if it did not."""
    return policy.settings if isinstance(policy, BackgroundLast) else PolicySettings()


def levels_of(policy: Policy) -> MultiLevel | None:
    """The queues of a policy that has several, unless a goal or fair shares are over it; background
    requests are in none of them."""
    inner = policy.inner if isinstance(policy, BackgroundLast) else policy
    return inner if isinstance(inner, MultiLevel) else None
