"""The ports of the control plane: clock, executor, cost model, policy."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.request import Request, RequestSpec
    from engine.step import Step, StepResult


class Clock(Protocol):
    """Seconds from a fixed origin; never goes back."""

    def __call__(self) -> float: ...


class StepFuture(Protocol):
    """The result of a submitted step. `asyncio.Future[StepResult]` is one."""

    def done(self) -> bool: ...

    def result(self) -> "StepResult": ...

    def add_done_callback(self, fn: Callable[..., object], /) -> None: ...


class StepExecutor(Protocol):
    """Runs steps on the workers. `submit` sends the step before it returns, and never waits.

    The future ends with a `StepResult`, with `StepFailed` (the requests of this step fail) or with
    `WorkerLost` (all KV on the device is lost). Steps run and return in the order of submission.
    """

    @property
    def is_alive(self) -> bool:
        """Whether steps can run: False from the loss of a worker until `restart` returns."""
        ...

    def watch(self, on_lost: "Callable[[], object]") -> None:
        """Call `on_lost` whenever a worker is lost, also when no step is in flight."""
        ...

    @property
    def depth(self) -> int:
        """How many steps may be in flight at the same time (Orca: `n_workers`)."""
        ...

    def submit(self, step: "Step") -> StepFuture: ...

    async def restart(self) -> None:
        """Restart the workers after `WorkerLost`. Raises `Unavailable` after too many restarts."""
        ...


class Cost(Protocol):
    """Predicts the duration of iterations, in seconds (`engine.cost.model`)."""

    def compute(self, num_tokens: int, start: int) -> float:
        """An iteration of one request: `num_tokens` tokens from position `start`."""
        ...

    def step(self, step: "Step") -> float: ...


class Policy(Protocol):
    """Orders the live requests. It holds no KV, reads no clock and drops no request.

    The scheduler calls `validate` before a request is accepted; `arrive` once per request, in any
    state of it when policies are switched; `ran` after each iteration that the request was part
    of, before the sampled token is counted; `leave` when it ends.
    """

    @property
    def preempts(self) -> bool:
        """Whether started requests may be preempted so that a more urgent one can start."""
        ...

    def validate(self, spec: "RequestSpec", num_tokens: int, now: float) -> None:
        """Raise `DeadlineUnmeetable` or `InvalidRequest` if the request cannot meet its deadline;
        `num_tokens` tokens of its prompt have to be computed."""
        ...

    def arrive(self, request: "Request", now: float) -> None: ...

    def ran(self, request: "Request", num_tokens: int, seconds: float, now: float) -> None:
        """`num_tokens` tokens of the request were computed in an iteration of `seconds`."""
        ...

    def leave(self, request: "Request", now: float) -> None: ...

    def order(self, now: float) -> "Iterator[Request]":
        """All live requests, most urgent first; the last one is the first to be preempted."""
        ...

    def next_scheduled_times(self, requests: "Sequence[Request]", now: float) -> list[float]:
        """How soon each of these live requests is expected to run next (FastServe's ENST). The unit
        is the policy's own; values are only compared with each other."""
        ...
