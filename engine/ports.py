"""What the control plane asks of the outside: a clock, an executor, a policy."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.request import Request, RequestSpec
    from engine.step import Step, StepResult


class Clock(Protocol):
    """Seconds from a fixed origin; never goes back."""

    def __call__(self) -> float: ...


class StepFuture(Protocol):
    """The answer to come. `asyncio.Future[StepResult]` is one."""

    def done(self) -> bool: ...

    def result(self) -> "StepResult": ...

    def add_done_callback(self, fn: Callable[..., object], /) -> None: ...


class StepExecutor(Protocol):
    """Where iterations run. `submit` hands the step over before it returns and never waits.

    The future ends with a `StepResult`, with `StepFailed` (this batch is lost) or with
    `WorkerLost` (the device and all KV on it are gone). Steps run and answer in order.
    """

    @property
    def is_alive(self) -> bool:
        """Whether steps can run: False from the loss of a worker, busy or idle, to `restart`."""
        ...

    def watch(self, on_lost: "Callable[[], object]") -> None:
        """Call `on_lost` whenever a worker is lost, also when no step is in flight."""
        ...

    @property
    def depth(self) -> int:
        """How many steps may be in flight at once (Orca: `n_workers`)."""
        ...

    def submit(self, step: "Step") -> StepFuture: ...

    async def restart(self) -> None:
        """Bring the workers back after `WorkerLost`; raises `Unavailable` past the bound."""
        ...


class Cost(Protocol):
    """Seconds of iterations that have not run; see `engine.cost.model`."""

    def compute(self, num_tokens: int, start: int) -> float:
        """One request alone: `num_tokens` tokens from position `start`."""
        ...

    def step(self, step: "Step") -> float: ...


class Policy(Protocol):
    """Orders the live requests; holds no KV, reads no clock, drops nobody.

    Every method is called by the scheduler: `vet` before a request is accepted, `arrive` once
    per request (wherever in its life it is, when policies are switched), `ran` after each
    iteration that the request was part of and before the token is counted, `leave` at its end.
    """

    @property
    def preempts(self) -> bool:
        """Whether a waiting request may take the KV of less urgent ones that have started."""
        ...

    def validate(self, spec: "RequestSpec", num_tokens: int, now: float) -> None:
        """Raise `DeadlineUnmeetable` or `InvalidRequest` if it had better not come; `num_tokens`
        of its prompt have to be computed."""
        ...

    def arrive(self, request: "Request", now: float) -> None: ...

    def ran(self, request: "Request", num_tokens: int, seconds: float, now: float) -> None:
        """It had `num_tokens` tokens computed in an iteration of `seconds`."""
        ...

    def leave(self, request: "Request", now: float) -> None: ...

    def order(self, now: float) -> "Iterator[Request]":
        """Live requests, most urgent first. The last is the first to give up its KV."""
        ...

    def next_scheduled_times(self, requests: "Sequence[Request]", now: float) -> list[float]:
        """How soon each of these live requests is expected to run next (FastServe's ENST), on a
        scale of the policy's own; only compared with each other."""
        ...
