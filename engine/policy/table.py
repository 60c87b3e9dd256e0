"""Policies by name. An oracle knows more than a server can know: for simulation only."""

from importlib import import_module
from typing import TYPE_CHECKING, cast

from engine.policy.background import BackgroundLast
from engine.policy.port import LearnsLengths, MultiLevel
from engine.policy.settings import PolicySettings

if TYPE_CHECKING:
    from engine.policy.estimates.lengths import LearnedLengths
    from engine.policy.port import Policy
    from engine.ports import Cost

POLICIES: dict[str, str] = {
    "fcfs": "engine.policy.fcfs:FirstComeFirstServed",
    "mlfq": "engine.policy.mlfq:SkipJoinMLFQ",
    "priority": "engine.policy.priority:LowestPriorityFirst",
    "fair": "engine.policy.fair:VirtualTokenCounter",
    "deadline": "engine.policy.deadline:EarliestFeasibleFirst",
    "gittins": "engine.policy.gittins:GittinsIndex",
}
ORACLES: dict[str, str] = {
    "srpt": "engine.policy.srpt:ShortestRemainingFirst",
}


def build(
    name: str,
    cost: "Cost",
    settings: PolicySettings | None = None,
    *,
    serves: bool = True,
    lengths: "LearnedLengths | None" = None,
) -> "Policy":
    """An empty policy of that name, behind which background requests are ordered. A policy that
    learns output lengths continues with `lengths`.

    ValueError if there is no such policy, or if it is an oracle and `serves` is True.
    """
    known = POLICIES if serves else POLICIES | ORACLES
    if name not in known:
        reason = " (simulation only)" if name in ORACLES else ""
        raise ValueError(f"policy must be one of {', '.join(known)}, not {name!r}{reason}")
    module, _, kind = known[name].partition(":")
    settings = settings or PolicySettings()
    policy = getattr(import_module(module), kind)(cost, settings)
    if lengths is not None and isinstance(policy, LearnsLengths):
        policy.lengths = lengths
    return BackgroundLast(cast("Policy", policy), settings)


def name_of(policy: "Policy") -> str:
    """The policy's name in the tables; its class name if it is in none."""
    kind = type(policy.inner if isinstance(policy, BackgroundLast) else policy)
    target = f"{kind.__module__}:{kind.__qualname__}"
    names = (name for name, known in (POLICIES | ORACLES).items() if known == target)
    return next(names, kind.__name__)


def settings_of(policy: "Policy") -> PolicySettings:
    """The settings with which `build` made the policy; the defaults if it did not."""
    return policy.settings if isinstance(policy, BackgroundLast) else PolicySettings()


def lengths_of(policy: "Policy") -> "LearnedLengths | None":
    """What a policy has learned about output lengths; None if it learns nothing."""
    inner = policy.inner if isinstance(policy, BackgroundLast) else policy
    return inner.lengths if isinstance(inner, LearnsLengths) else None


def levels_of(policy: "Policy") -> MultiLevel | None:
    """The queues of a policy that has several; background requests are in none of them."""
    inner = policy.inner if isinstance(policy, BackgroundLast) else policy
    return inner if isinstance(inner, MultiLevel) else None
