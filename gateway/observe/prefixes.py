"""PrefixHistory: why a prompt was not in the prefix cache, or only its beginning.

The names of the blocks of recent requests are remembered, whether or not their content is still
cached. So of a request's prompt it is known how far it is that of an earlier request, its
*relative*, and whether all of that was found in the cache.
"""

from collections import OrderedDict
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

from engine.control.scheduler import IterationScheduler
from engine.request import Request

MAX_BLOCKS = 1 << 16  # blocks whose names are remembered, about 10 MiB
MAX_ORIGINS = 1024  # first blocks whose salt and adapter are remembered


class Reason(StrEnum):
    """Why the rest of a prompt was computed."""

    NEW = "new"  # no earlier request begins like this one
    DIVERGED = "diverged"  # an earlier request begins like this one, and goes on otherwise
    CACHED = "cached"  # nothing was computed that the cache could have had
    EVICTED = "evicted"  # more of it is that of an earlier request than was found
    OTHER_SALT = "other_salt"  # it begins like an earlier request with another salt or key
    OTHER_ADAPTER = "other_adapter"  # … with another LoRA adapter
    LOGPROBS = "logprobs"  # its prompt's log-probabilities were requested


class PrefixReport(NamedTuple):
    """How much of a prompt was known.

    The first `num_known` tokens are those of the request `relative` (its id, "" if it was another
    caller's), of which `num_cached` were in the cache. `message` is the number of the first message
    that ends behind them; None if it is not known, as in a report that no one has read yet.
    """

    reason: Reason
    num_known: int
    num_cached: int
    relative: str = ""
    message: int | None = None

    def as_json(self) -> dict[str, object]:
        """The report in a timeline."""
        return {
            "reason": self.reason.value,
            "known_tokens": self.num_known,
            "cached_tokens": self.num_cached,
            "relative": self.relative or None,
            "message": self.message,
        }


class _Origin(NamedTuple):
    """The salt and the adapter under which a first block was last seen."""

    salt: str
    lora_digest: str


class PrefixHistory:
    """Remembers the prompts and outputs of recent requests by the names of their blocks."""

    def __init__(self) -> None:
        self._block_size = 0  # until it is attached; then nothing is known
        self._seen: OrderedDict[bytes, tuple[str, str]] = OrderedDict()  # tenant and label
        self._origins: OrderedDict[bytes, _Origin] = OrderedDict()  # by the tokens of first blocks
        # The last prompt, by its owner and its last full block, and what was known of it.
        self._last: tuple[tuple[tuple[str, str], bytes] | None, PrefixReport | None] = (None, None)

    def attach(self, scheduler: IterationScheduler) -> None:
        """Explain the requests of this scheduler."""
        if scheduler.settings.reuses_prefixes:
            self._block_size = scheduler.kv.block_size

    def ended(self, request: Request) -> PrefixReport | None:
        """What was known of a request, which is known from now on. Choices of one response have the
        same report; those that go on behind another request of their response have none."""
        size, spec = self._block_size, request.spec
        if not size or not request.block_hashes:
            return None
        num_prompt = request.prompt_len // size
        owner = (spec.tenant, spec.label)
        last = request.block_hashes[num_prompt - 1 : num_prompt]  # an aborted request has none
        named = (owner, last[0]) if last else None
        if named is not None and named == self._last[0]:
            self._remember(request, num_prompt)  # another choice of the same prompt
            return self._last[1]
        report = self.report(request)
        self._last = (named, report)
        self._remember(request, spec.shared_len // size)
        return report

    def report(self, request: Request) -> PrefixReport | None:
        """What is known of a request; None if it was never computed."""
        size, spec = self._block_size, request.spec
        hashes = request.block_hashes[: request.prompt_len // size] if size else []
        if not hashes or request.times.admitted_at is None or spec.behind is not None:
            return None
        seen = self._seen
        unknown = (place for place, name in enumerate(hashes) if name not in seen)
        num_blocks = next(unknown, len(hashes))
        num_known, num_cached = num_blocks * size, request.num_cached
        tenant, label = seen[hashes[num_blocks - 1]] if num_blocks else ("", "")
        return PrefixReport(
            self._reason(request, num_blocks),
            num_known,
            num_cached,
            label if tenant == spec.tenant else "",
        )

    def _reason(self, request: Request, num_blocks: int) -> Reason:
        size = self._block_size
        num_all = request.prompt_len // size
        reusable = min(num_blocks, (request.prompt_len - 1) // size)
        if request.num_cached // size >= reusable:
            if num_blocks:
                return Reason.CACHED if num_blocks == num_all else Reason.DIVERGED
            return self._reason_of_new(request)
        return Reason.LOGPROBS if request.spec.prompt_logprobs is not None else Reason.EVICTED

    def _reason_of_new(self, request: Request) -> Reason:
        origin = self._origins.get(_first_tokens(request, self._block_size))
        if origin is None:
            return Reason.NEW
        is_other = origin.lora_digest != request.spec.lora_digest
        return Reason.OTHER_ADAPTER if is_other else Reason.OTHER_SALT

    def _remember(self, request: Request, first: int) -> None:
        """Others may begin like an ended request, of which the blocks before number `first` are
        remembered, or go on where it ended."""
        size, spec, seen = self._block_size, request.spec, self._seen
        owner = (spec.tenant, spec.label)
        for name in request.block_hashes[first : request.num_computed // size]:
            seen[name] = owner
            seen.move_to_end(name)
        while len(seen) > MAX_BLOCKS:
            seen.popitem(last=False)
        if first:
            return
        self._origins[_first_tokens(request, size)] = _Origin(spec.salt, spec.lora_digest)
        if len(self._origins) > MAX_ORIGINS:
            self._origins.popitem(last=False)


def _first_tokens(request: Request, size: int) -> bytes:
    """The tokens of a request's first block, whatever its salt and adapter."""
    ids = ",".join(map(str, request.tokens(0, size)))
    return blake2b(ids.encode(), digest_size=16).digest()
