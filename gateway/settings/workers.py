"""Settings of how the model is run: the scheduling policy, and how workers are launched."""

from dataclasses import dataclass
from pathlib import Path

from engine.policy import POLICIES
from engine.setting import advanced, setting


def _check_policy(name: str) -> None:
    if name not in POLICIES:
        raise ValueError(f"must be one of {', '.join(POLICIES)}, not {name!r}")


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """The scheduling policy, and what it knows about the times of iterations."""

    policy: str = setting(
        "fcfs",
        "scheduling",
        "scheduling policy: " + ", ".join(POLICIES),
        "NAME",
        check=_check_policy,
    )
    cost_model: str = advanced(
        "auto",
        "scheduling",
        "where the cost model of iterations comes from; auto: saved for this model and machine, "
        "else measured; measure: measured again; none: fitted while serving",
        choices=("auto", "measure", "none"),
    )
    cache_dir: Path | None = advanced(
        None,
        "scheduling",
        "directory for saved cost models; default: the user's cache directory",
        "DIR",
    )


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Where workers run, and how far the server plans ahead of them."""

    lookahead: str = advanced(
        "auto",
        "workers",
        "1: plan an iteration before the previous one's tokens are known, so that workers do not "
        "wait for the event loop; a request that ends may then compute one token too many; "
        "auto: on a GPU, and on CPUs with short steps and an idle core",
        choices=("auto", "0", "1"),
    )
    launcher: str = setting(
        "local",
        "workers",
        "local: worker processes on this machine; ray: actors on a Ray cluster",
        choices=("local", "ray"),
    )
    ray_address: str = advanced(
        "auto", "workers", "address of the Ray cluster; auto: this machine's cluster", "ADDRESS"
    )
    replicas: int = advanced(
        1,
        "workers",
        "copies of the model behind one queue, each with its share of the KV cache: on its share "
        "of the cores, on GPUs of its own, or on a Ray cluster; 0: one for each NUMA node",
        "N",
        ge=0,
        le=64,
    )
    trace: Path | None = advanced(
        None,
        "workers",
        "write a Chrome trace of each worker's steps to this file (see ui.perfetto.dev)",
        "FILE",
    )
