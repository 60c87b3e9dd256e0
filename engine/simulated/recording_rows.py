"""The lines of a recording, as `engine.control.event_recorder` writes them."""

import msgspec

from engine.policy import PolicySettings


class ArrivalRow(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An arrival of `engine.control.event_recorder`."""

    at: float
    arrived: int
    prompt: int = 0
    max_tokens: int = 0
    min_tokens: int = 0
    priority: int = 0
    tenant: str = ""
    client: str = ""
    weight: float = 1.0
    ttft_deadline: float | None = None
    deadline: float | None = None
    is_background: bool = False
    itl_goal: float | None = None
    is_pooling: bool = False
    retention: float = 0.0
    blocks: tuple[int | str, ...] = ()
    images: tuple[tuple[int, int, int | str], ...] = ()


class IterationRow(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One event of `engine.control.event_recorder`; the kind of event is the field that is set."""

    at: float
    arrival: ArrivalRow | None = None
    blocks: tuple[int | str, ...] = ()  # the blocks of a request that ended
    planned: int | None = None
    entries: tuple[tuple[int, int, int], ...] = ()
    moves: tuple[tuple[str, int, bool], ...] = ()
    committed: int | None = None
    seconds: float = 0.0
    faults: tuple[int, ...] = ()
    failed: int | None = None
    ended: int | None = None
    outcome: str = ""
    reason: str = ""
    produced: int = 0
    cancelled: int | None = None
    preempted: int | None = None
    switched: str | None = None
    settings: PolicySettings | None = None  # settings of the policy switched to
    idled: bool = False
    lost: bool = False
    given_up: bool = False

    @property
    def arrived(self) -> int | None:
        """The number of the request that arrived."""
        return None if self.arrival is None else self.arrival.arrived
