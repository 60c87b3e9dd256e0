"""Readings: the state of the server that metrics, the live view and `/v1/loads` show alike.

Each is read at the moment of the call; nothing is stored.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING

from engine.request import State
from engine.step import Tier

if TYPE_CHECKING:
    from engine.control.scheduler import IterationScheduler
    from engine.cost.errors import ErrorSummary
    from engine.kv.ledger import KVLedger
    from engine.pool import RequestPool
    from gateway.observe.loras import LoraUsage
    from gateway.observe.metrics import Metrics
    from gateway.observe.request_log import RequestLog
    from gateway.store.database import Database


@dataclass(frozen=True, slots=True)
class Readings:
    """The parts of the server that are read."""

    metrics: "Metrics"
    scheduler: "IterationScheduler"
    database: "Database"
    request_log: "RequestLog"
    lora_usage: "LoraUsage"

    @property
    def pool(self) -> "RequestPool":
        return self.scheduler.pool

    @property
    def ledger(self) -> "KVLedger":
        return self.scheduler.ledger

    @property
    def num_waiting(self) -> int:
        """Requests that wait for KV slots."""
        return self.pool.count(State.WAITING)

    @property
    def prefix_tokens(self) -> dict[str, int]:
        """Prompt tokens found in the prefix cache (hit) and computed (miss)."""
        hits, tokens = self.metrics.num_cached_tokens, self.metrics.num_prompt_tokens
        return {"hit": hits, "miss": tokens - hits}

    @property
    def num_used_blocks(self) -> int:
        """KV blocks on the device that requests hold or move."""
        return self.ledger.num_held + self.ledger.num_moving

    @property
    def kv_blocks(self) -> dict[tuple[str, str], int]:
        """KV blocks by tier and state."""
        ledger = self.ledger
        return {
            ("device", "free"): ledger.num_free - ledger.num_cached,
            ("device", "held"): ledger.num_held,
            ("device", "cached"): ledger.num_cached,
            ("device", "moving"): ledger.num_moving,
            ("host", "free"): ledger.host.num_free - ledger.host.cached.num_replaceable,
            ("host", "held"): ledger.host.num_held,
            ("host", "cached"): len(ledger.host.cached),
            ("host", "moving"): ledger.host.num_moving,
            ("disk", "cached"): len(ledger.disk),
            ("store", "cached"): len(ledger.lower.get(Tier.STORE, ())),
        }

    @property
    def itl_goal(self) -> float | None:
        """The server's ITL goal in seconds."""
        goal = self.scheduler.settings.itl_goal
        return None if goal == inf else goal

    @property
    def cost_error(self) -> "ErrorSummary | None":
        """Relative errors of the predicted seconds of recent steps; None before the first step."""
        return self.scheduler.cost.errors.summary()

    def http_requests_by_class(self) -> Counter[tuple[str, str, str]]:
        """HTTP requests by route, method and class of status."""
        counts: Counter[tuple[str, str, str]] = Counter()
        for (path, method, status), count in self.request_log.requests.items():
            counts[path, method, f"{status // 100}xx"] += count
        return counts

    def lora_requests(self) -> dict[tuple[str, str, str], float]:
        """vLLM's labels, the adapters of waiting and of running requests, and the time."""
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for request in self.pool:
            if (lora := request.spec.lora) is not None:
                names[request.state is State.WAITING].add(lora.name)
        waiting, running = (",".join(sorted(names[is_waiting])) for is_waiting in (True, False))
        labels = str(self.lora_usage.max_loras), waiting, running
        return {labels: datetime.now(UTC).timestamp()}
