"""EventRecorder: writes the events of a scheduler as JSON lines, from which it can be replayed.

The first line (`RecordingHeader`) has the settings. Every other line is an event with its time
`at`, in seconds of the engine's clock, and one of these:

    arrived    request: its `prompt` length, `max_tokens`, and those of min_tokens, priority,
               tenant, client, weight, ttft_deadline, deadline, is_background, itl_goal, is_pooling,
               retention that are not the default;
               `blocks` names the content of its prompt's full blocks: equal name, equal prefix;
               `images`: first position, number of tokens and name of each
    planned    step: `entries`, each with request, first position and number of tokens; `moves` of
               KV, if any: direction, number of blocks, and whether the step awaits them
    committed  step: the worker's `seconds`, and the requests that had `faults`
    failed     step
    ended      request: `outcome`, `reason`, tokens `produced`, `blocks` beyond the prompt's
    cancelled  request: `reason`        preempted  request
    switched   name of a policy: its `settings`
    idled, lost (the worker), given_up (all requests): true

A recording has no texts and no token ids, and neither can be derived from the names in it.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import NamedTuple

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.iteration import Iteration, Observer
from engine.kv.ledger import KVLedger
from engine.kv.prefix import hash_blocks
from engine.kv_shape import KVShape
from engine.media import EncoderReport, Span
from engine.policy import PolicySettings, build, name_of, settings_of
from engine.policy.base import Policy
from engine.request import Request, State
from engine.speculation.drafter import Drafter

Row = dict[str, object]
Name = Callable[[bytes | str], object]

VERSION = 1  # fixed: the format of a recording
_OPTIONAL = {
    "min_tokens": 0,
    "priority": 0,
    "tenant": "",
    "client": "",
    "weight": 1.0,
    "ttft_deadline": None,
    "deadline": None,
    "is_background": False,
    "itl_goal": None,
    "is_pooling": False,
    "retention": 0.0,
}


# Settings that the first recordings had: each recording has them. Others are left out if they have
# their defaults, so that a new setting changes no recording that does not use it.
_FIRST = {
    "": ("depth", "lookahead"),
    "kv": ("num_blocks", "block_size", "num_host_blocks"),
    "policies": (
        "starvation_seconds",
        "seats",
        "base_quantum",
        "ratio",
        "num_levels",
        "skips",
        "input_weight",
        "output_weight",
    ),
    "scheduler": (
        "max_model_len",
        "max_batch_size",
        "max_batch_tokens",
        "admission",
        "max_queue_requests",
        "max_queue_tokens",
        "max_step_overs",
        "max_preemptions",
        "swap",
        "max_crashes",
        "reuses_prefixes",
        "scan_limit",
    ),
    "cost": ("curve", "per_slot", "per_pair", "per_draw", "idle_step", "idle_entry"),
}


_LEADING = (  # names of a header in the order of the first recordings; others follow
    "policy",
    "policies",
    "scheduler",
    "num_blocks",
    "block_size",
    "depth",
    "cost",
    "lookahead",
)


class _Blocks(NamedTuple):
    """The content of a request's blocks from block `first` on; hashed only when it is written."""

    salt: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    block_size: int
    first: int
    lora_digest: str
    spans: tuple[Span, ...]

    def hashes(self) -> list[bytes]:
        tokens = self.prompt + self.output
        digests = hash_blocks(self.salt, tokens, self.block_size, self.lora_digest, self.spans)
        return digests[self.first :]


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """The settings with which requests are served, before the first one arrives."""

    policy: str
    policies: PolicySettings
    scheduler: SchedulerSettings
    kv: KVShape
    depth: int
    cost: CostModel
    lookahead: int = 0

    @property
    def _kept(self) -> tuple[int | None, ...]:
        """The windows whose blocks are given back. With reserving admission a request gets all its
        blocks when it starts, so that it always finishes, and gives none back."""
        grows = self.scheduler.admission is Admission.GROW
        return self.kv.windows if grows else (None,) * len(self.kv.windows)

    def build(
        self,
        cost: LiveCost,
        observer: Observer,
        drafter: Drafter | None = None,
        encoder: EncoderReport | None = None,
    ) -> IterationScheduler:
        """An empty scheduler with these settings."""
        policy = build(self.policy, cost, self.policies, serves=False)
        chunk = self.scheduler.max_batch_tokens * (1 + self.lookahead)
        ledger = KVLedger(replace(self.kv, windows=self._kept, chunk=chunk))
        return IterationScheduler(self.scheduler, ledger, policy, observer, cost, drafter, encoder)

    def line(self) -> str:
        """The first line of a recording, without settings that have their defaults and are newer
        than the first recordings. The fields of `kv` are beside the header's own."""
        own = _recorded(self, "")
        kv = _recorded(self.kv, "kv")
        row = {name: (own | kv)[name] for name in _LEADING} | kv
        return json.dumps({"podway_recording": VERSION} | row, separators=(",", ":"))


def _recorded(settings: object, section: str) -> Row:
    """The fields of a dataclass, and of those in it, by their names."""
    row: Row = {}
    for each in fields(settings):  # type: ignore[arg-type] # it is a dataclass
        value = getattr(settings, each.name)
        if each.name in _FIRST:
            value = _recorded(value, each.name)
        elif each.name not in _FIRST[section] and value == each.default:
            continue
        row[each.name] = value.value if isinstance(value, Enum) else value
    return row


class EventRecorder(Observer):
    """Calls `write` with a row for each event. A row refers to the event's objects and copies
    little; `render` makes a line of it, which another thread may do."""

    def __init__(self, write: Callable[[Row], None], block_size: int) -> None:
        self._write = write
        self._block_size = block_size

    def arrived(self, request: Request, now: float) -> None:
        spec = request.spec
        row: Row = {"at": now, "arrived": request.request_id, "prompt": len(spec.prompt)}
        row["max_tokens"] = spec.max_tokens
        for name, default in _OPTIONAL.items():
            value = getattr(spec, name)
            if value != default:
                row[name] = value
        if request.prompt_len >= self._block_size:
            row["blocks"] = _Blocks(
                spec.salt, spec.prompt, (), self._block_size, 0, spec.lora_digest, spec.spans
            )
        if spec.spans:
            row["images"] = spec.spans
        self._write(row)

    def planned(self, iteration: Iteration, now: float) -> None:
        step = iteration.step
        row: Row = {"at": now, "planned": step.step_id, "entries": step.entries}
        if step.moves:
            row["moves"] = step.moves
        self._write(row)

    def idled(self, now: float) -> None:
        self._write({"at": now, "idled": True})

    def committed(self, iteration: Iteration, seconds: float, now: float) -> None:
        row: Row = {"at": now, "committed": iteration.step.step_id, "seconds": seconds}
        faults = [request for request in iteration.requests if request.state is State.FAILED]
        if faults:
            row["faults"] = [request.request_id for request in faults]
        self._write(row)

    def failed(self, iteration: Iteration, now: float) -> None:
        self._write({"at": now, "failed": iteration.step.step_id})

    def preempted(self, request: Request, now: float) -> None:
        self._write({"at": now, "preempted": request.request_id})

    def cancelled(self, request: Request, now: float) -> None:
        assert request.abort is not None, "a cancel has a reason"
        reason = request.abort.value
        self._write({"at": now, "cancelled": request.request_id, "reason": reason})

    def ended(self, request: Request, now: float) -> None:
        finish, abort = request.finish, request.abort
        reason = finish.value if finish else abort.value if abort else request.state.value
        row: Row = {"at": now, "ended": request.request_id, "outcome": request.outcome}
        row |= {"reason": reason, "produced": request.produced}
        size, first = self._block_size, request.prompt_len // self._block_size
        if (request.num_tokens - 1) // size > first:
            output = tuple(request.output[:-1])
            spec = request.spec
            row["blocks"] = _Blocks(
                spec.salt, spec.prompt, output, size, first, spec.lora_digest, spec.spans
            )
        self._write(row)

    def worker_lost(self, now: float) -> None:
        self._write({"at": now, "lost": True})

    def given_up(self, now: float) -> None:
        self._write({"at": now, "given_up": True})

    def switched(self, policy: Policy, now: float) -> None:
        settings = asdict(settings_of(policy))
        self._write({"at": now, "switched": name_of(policy), "settings": settings})


def render(row: Row, name: Name) -> str:
    """The line of a row; `name` returns the name of a block, tenant or client in this recording."""
    shown = dict(row)
    if "entries" in row:
        entries = row["entries"]
        shown["entries"] = [[e.request_id, e.start, len(e.tokens)] for e in entries]  # type: ignore[attr-defined]
    if "moves" in row:
        moves = row["moves"]
        shown["moves"] = [[m.direction.value, m.num_blocks, m.is_awaited] for m in moves]  # type: ignore[attr-defined]
    if "blocks" in row:
        shown["blocks"] = [name(block) for block in row["blocks"].hashes()]  # type: ignore[attr-defined]
    if "images" in row:
        shown["images"] = [[*span[:2], name(span.digest)] for span in row["images"]]  # type: ignore[attr-defined]
    for field in ("tenant", "client"):
        if field in row:
            shown[field] = str(name(row[field]))  # type: ignore[arg-type]
    return json.dumps(shown, separators=(",", ":"))
