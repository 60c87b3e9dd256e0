"""Settings of the scheduling policy."""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator
from pydantic_settings import BaseSettings

from engine.policy import POLICIES
from gateway.settings.flags import duration
from gateway.settings.options import option as _option


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"--policy must be one of {', '.join(POLICIES)}, not {name!r}")
    return name


class PolicyFields(BaseSettings):
    """The fields under `scheduling` of `podway serve --help` that choose and change the order."""

    policy: Annotated[str, AfterValidator(_known_policy)] = _option(
        "fcfs", "scheduling", "scheduling policy: " + ", ".join(POLICIES), "NAME"
    )
    starvation_seconds: float | None = _option(
        None,
        "scheduling",
        "a request that waits longer between two iterations runs first; default: the policy's own",
        "SECONDS",
        gt=0,
    )
    base_quantum: float | None = _option(
        None,
        "scheduling",
        "mlfq: quantum of the highest queue; default: the shortest iteration",
        "SECONDS",
        gt=0,
    )
    quantum_ratio: float = _option(
        2.0, "scheduling", "mlfq: quantum of a queue over that of the next higher one", "X", gt=1
    )
    num_levels: int = _option(16, "scheduling", "mlfq: number of queues", "N", ge=1, le=64)
    skip_join: bool = _option(
        True, "scheduling", "mlfq: the queue that a request joins follows from its prompt's length"
    )
    min_outputs: int = _option(
        50,
        "scheduling",
        "gittins: outputs that must have ended before lengths are used; FCFS until then",
        "N",
        ge=1,
    )
    fcfs_slack: float = _option(
        0.005,
        "scheduling",
        "gittins: how much later than under fcfs a request may be, as a share of its age; a larger "
        "one lowers the mean completion time and raises the p99",
        "SHARE",
        ge=0,
    )
    input_weight: float = _option(
        1.0, "scheduling", "fair, --fair-keys: cost of a prompt token", "W", gt=0
    )
    output_weight: float = _option(
        2.0, "scheduling", "fair, --fair-keys: cost of an output token", "W", gt=0
    )
    fair_keys: bool = _option(
        False,
        "scheduling",
        "API keys get equal shares, and --policy orders the requests of each key",
    )
    ttft_goal: Annotated[float, BeforeValidator(duration)] = _option(
        0.0,
        "scheduling",
        "goal for the time to the first token, such as 2s: requests that can meet it run before "
        "those that cannot, under any policy; 0: no goal",
        "DURATION",
        ge=0,
    )
