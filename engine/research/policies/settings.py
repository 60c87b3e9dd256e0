"""Settings of policies under research, as flags of simulations."""

from dataclasses import dataclass

from engine.setting import setting


@dataclass(frozen=True, slots=True)
class ResearchSettings:
    """The fields of `PolicySettings` that only policies under research read."""

    min_outputs: int = setting(
        50,
        "scheduling",
        "gittins: outputs that must have ended before lengths are used; FCFS until then",
        "N",
        ge=1,
    )
    fcfs_slack: float = setting(
        0.005,
        "scheduling",
        "gittins: how much later than under fcfs a request may be, as a share of its age; a larger "
        "one lowers the mean completion time and raises the p99",
        "SHARE",
        ge=0,
    )
