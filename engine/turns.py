"""Turns: groups of workers on the same cores compute one after the other, by their shares.

Two engines whose workers have the same cores would slow each other down by more than their work:
thread pools wait for threads that do not run, and no cost model is right any more. So an engine
submits iterations only while it has the turn. The turn goes to the waiting engine that has computed
the least for its share (start-time fair queueing); an engine that nobody waits for keeps it.
"""

from collections.abc import Callable

from engine.ports import Clock


class Turns:
    """The turns of all engines on the same cores."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holder: Turn | None = None
        self._taken_at = 0.0  # since when the holder's time has not been counted
        self._waiting: list[Turn] = []
        self._floor = 0.0  # what an engine that was idle is taken to have used

    def __repr__(self) -> str:
        return f"Turns(holder={self._holder!r}, waiting={self._waiting!r})"

    def join(self, share: float = 1.0) -> "Turn":
        """The turn of one more engine; a share of 2 is twice the time of a share of 1."""
        return Turn(self, share)

    def take(self, turn: "Turn") -> bool:
        """Whether the engine may submit an iteration now; if not, it is woken when it may."""
        if self._holder is turn:
            self._count()
            if self._waiting and self._next().used < turn.used:
                return False
            self._floor = turn.used
            return True
        if self._holder is None and not self._waiting:
            self._grant(turn)
            return True
        if turn not in self._waiting:
            turn.used = max(turn.used, self._floor)
            self._waiting.append(turn)
        return False

    def give(self, turn: "Turn") -> None:
        """The engine has no iteration in flight, and takes the turn again before it submits one."""
        if self._holder is turn:
            self._count()
            self._holder = None
            if self._waiting:
                successor = self._next()
                self._waiting.remove(successor)
                self._grant(successor)
                successor.wake()
        elif turn in self._waiting:
            self._waiting.remove(turn)

    def _next(self) -> "Turn":
        return min(self._waiting, key=lambda turn: turn.used)

    def _grant(self, turn: "Turn") -> None:
        self._holder = turn
        self._taken_at = self._clock()
        self._floor = turn.used = max(turn.used, self._floor)

    def _count(self) -> None:
        assert self._holder is not None, "only a holder's time is counted"
        now = self._clock()
        self._holder.used += (now - self._taken_at) / self._holder.share
        self._taken_at = now


class Turn:
    """The turn of one engine. `used` are the seconds that it has computed, divided by its share."""

    def __init__(self, turns: Turns, share: float) -> None:
        self.share = share
        self.used = 0.0
        self.wake: Callable[[], object] = _ignore  # set by the engine
        self._turns = turns
        self._parts = _Parts()

    def __repr__(self) -> str:
        return f"Turn(share={self.share:g}, used={self.used:.3f})"

    def take(self) -> bool:
        """Whether the engine may submit an iteration now; if not, `wake` is called when it may."""
        return self._turns.take(self)

    def give(self) -> None:
        """Let the others compute: no iteration of this engine is in flight."""
        self._turns.give(self)

    def part(self) -> "TurnPart":
        """The turn for one more engine of the same model, on cores of its own. All turns of the
        model are parts then."""
        return TurnPart(self, self._parts)


class TurnPart(Turn):
    """The turn of a model for one of its replicas, which compute at the same time: the model has
    the turn while one of them has an iteration in flight."""

    def __init__(self, whole: Turn, parts: "_Parts") -> None:
        super().__init__(whole._turns, whole.share)
        self._whole = whole
        self._shared = parts
        whole.wake = parts.wake

    def take(self) -> bool:
        shared = self._shared
        if self._whole.take():
            shared.waiting.pop(self, None)
            shared.holding[self] = None
            return True
        shared.waiting[self] = None
        return False

    def give(self) -> None:
        shared = self._shared
        shared.waiting.pop(self, None)
        shared.holding.pop(self, None)
        if not shared.holding:
            self._whole.give()
            if shared.waiting and self._whole.take():
                shared.wake()


class _Parts:
    """The replicas of a model that have an iteration in flight, and those that wait for the turn,
    each in their order."""

    def __init__(self) -> None:
        self.holding: dict[TurnPart, None] = {}
        self.waiting: dict[TurnPart, None] = {}

    def wake(self) -> None:
        """The model has the turn."""
        for part in list(self.waiting):
            part.wake()


def _ignore() -> None:
    """Nothing waits for the turn yet."""
