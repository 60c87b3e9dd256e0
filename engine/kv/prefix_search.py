"""PrefixSearch: how much of a request's KV is in the cache, or is being computed right now.

Hashing takes time, so that a search may take several plans. Where layers do not keep all their KV,
a request cannot start behind every cached block: each layer group must have what is read next.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from engine.kv.ledger import KVLedger
from engine.kv.prefix import NAMES_PER_PLAN, PrefixListener, extend_hashes, name_in_group
from engine.request import Request, RequestSpec, State
from engine.step import PageKind, Tier

MIN_COMMON = 64  # tokens: to compute fewer twice costs less than to wait (results/constants)
CHUNK = 512  # fixed: no decision depends on it; tokens that are compared at a time
SWAPPED = State.SWAPPED  # bound once (see engine.pool)


class PrefixSearch:
    """Finds the cached prefixes of waiting requests. If it is not on, it finds none."""

    def __init__(self, ledger: KVLedger, *, is_on: bool) -> None:
        self._ledger = ledger
        self._index = ledger.prefixes
        self._states = ledger.states
        self._block_size = ledger.block_size
        self._has_chain = ledger.groups.has_full_group
        self._lower = ledger.blocks.lower
        self._has_holes = bool(self._lower) and not ledger.keeps_all
        self._cached = ledger.blocks if self._has_holes else self._index
        self._is_on = is_on
        self.hashes_left = NAMES_PER_PLAN
        self._prefills: dict[bytes, Request] = {}  # in flight, by the hash of their next block

    def begin_plan(self, now: float) -> None:
        """Allow `NAMES_PER_PLAN` hashes, forget prefills that are not in flight any more, and go
        on with the retention of pages."""
        self.hashes_left = NAMES_PER_PLAN
        if self._ledger.retains:
            for pages in self._ledger.pages.values():
                pages.sort_retained(now)
        if self._prefills:
            flying = [r for r in self._prefills.values() if r.num_in_flight]
            self._prefills.clear()
            for request in flying:
                self.note_prefill(request)

    def find(self, request: Request) -> bool:
        """Look for the request's blocks in the cache, from where the last search ended, and behind
        them in the tiers below. Returns False if the search has to continue in the next plan,
        because hashing takes time."""
        if not self._is_on:
            return True
        hashes, found = request.block_hashes, request.found
        num_full = request.num_tokens // self._block_size
        if not self._has_chain:  # any block may be missing: only the last window counts
            known = self._first_missing(request, len(hashes), num_full, lambda block_hash: True)
            found.num_matched = len(self._reusable(request, num_full))
            return known == num_full
        matched = found.num_matched
        if found.num_evictions_seen != self._index.num_evictions:
            matched = self._index.num_matched(hashes, matched, found.num_evictions_seen)
            found.num_evictions_seen = self._index.num_evictions
        if self._has_holes and found.num_drops_seen != self._lower.num_drops:
            matched, found.num_drops_seen = 0, self._lower.num_drops
        matched = self._first_missing(request, matched, num_full, self._cached.__contains__)
        found.num_matched = known = matched
        if self._lower and not self._has_holes and known < len(hashes):
            known = self._first_missing(request, known, num_full, self._lower.has)
        return known == num_full or known < len(hashes)

    def num_to_compute(self, request: Request) -> int:
        """Known tokens of a request without KV whose KV is not in the cache, as far as it was
        looked for."""
        self.find(request)
        return request.num_tokens - request.found.num_matched * self._block_size

    def most_reusable(self, request: Request) -> int:
        """How many of the known tokens may come from the cache: a request that is not swapped
        computes at least one, and those whose prompt log-probabilities are still missing."""
        if request.state is SWAPPED:
            return request.num_computed
        if request.wants_prompt_logprobs:
            return len(request.prompt_logprobs)
        return request.num_tokens - 1

    def prefix(self, request: Request) -> Sequence[bytes]:
        """Hashes of the request's leading blocks that it can start behind. They are on the device,
        held or cached; where layers do not keep all their KV, also in the tiers below."""
        if request.state is SWAPPED and not self._ledger.keeps_all:
            return ()  # all that it needs is in its copy
        self.find(request)
        return self._reusable(request, self.most_reusable(request) // self._block_size)

    def num_known(self, request: Request) -> int:
        """The tokens that a request without KV will not compute, as far as is known: those of its
        prefix on the device, and of the blocks behind it that the tiers below have."""
        if request.state is SWAPPED:
            return request.num_computed
        count, hashes = len(self.prefix(request)), request.block_hashes
        if self._lower and not self._has_holes:
            most = min(len(hashes), self.most_reusable(request) // self._block_size)
            while count < most and self._lower.has(hashes[count]):
                count += 1
        return count * self._block_size

    def to_look_up(self, request: Request) -> list[tuple[PageKind, bytes]]:
        """The pages of the first blocks of a request's prompt that are on no tier, as far as is
        known, so that a shared store may have them."""
        count = min(self.most_reusable(request) // self._block_size, NAMES_PER_PLAN)
        extend_hashes(request, self._block_size, count)
        hashes, groups, states = request.block_hashes[:count], self._ledger.groups, self._states
        names = {
            PageKind.BLOCK: [name_in_group(one, n) for n in range(len(groups)) for one in hashes],
            PageKind.SNAPSHOT: [states.name_of(one) for one in hashes] if states.is_on else [],
        }
        pages = self._ledger.pages
        return [(kind, n) for kind, all_of in names.items() for n in all_of if n not in pages[kind]]

    def learn(self, names: Iterable[tuple[PageKind, bytes]], stored: Container[bytes]) -> None:
        """Note that of these pages a shared store has those in `stored`."""
        for kind, name in names:
            lower = self._ledger.pages[kind].lower
            if name in stored and Tier.STORE in lower:
                lower[Tier.STORE].learn((name,))

    def listen(self, listener: PrefixListener) -> None:
        """Report to `listener` which pages are cached, and their copies below."""
        for pages in self._ledger.pages.values():
            if pages.pool.num_pages:
                pages.pool.listen(listener)

    def restore_disk(self, names: Mapping[PageKind, bytes]) -> None:
        """The disk tier has these pages from earlier (`LowerTiers.restore_disk`)."""
        for kind, of_kind in names.items():
            self._ledger.pages[kind].lower.restore_disk(of_kind)

    def _reusable(self, request: Request, most: int) -> Sequence[bytes]:
        """The hashes of the longest prefix that was found, of at most `most` blocks, behind which
        the request can start."""
        hashes, found = request.block_hashes, request.found
        count = min(found.num_matched if self._has_chain else len(hashes), most)
        if count and not self._ledger.keeps_all:
            key = (count, sum([pages.version for pages in self._ledger.pages.values()]))
            if found.reusable_at != key:
                found.num_reusable = self._num_reusable(hashes, count)
                found.reusable_at = key
            count = found.num_reusable
        if len(found.reusable_hashes) != count:  # copied once: it may wait for many plans
            found.reusable_hashes = hashes[:count]
        return found.reusable_hashes

    def _num_reusable(self, hashes: Sequence[bytes], most: int) -> int:
        """The largest number of hashes, at most `most`, behind which every layer group has the
        blocks that are read next, and recurrent layers have a snapshot."""
        groups, count = self._ledger.groups, most
        while True:
            found = self._states.longest(hashes, count)
            count = groups.num_reusable(hashes, found, self._cached)
            if count == found:
                return count

    def _first_missing(
        self, request: Request, start: int, stop: int, has: Callable[[bytes], bool]
    ) -> int:
        """The first of the request's blocks from `start` on whose hash `has` does not have; `stop`
        at most, and not beyond the hashes that this plan may compute."""
        hashes = request.block_hashes
        for index in range(start, stop):
            if index == len(hashes):
                if not self.hashes_left:
                    return index
                self.hashes_left -= 1
                extend_hashes(request, self._block_size, index + 1)
            if not has(hashes[index]):
                return index
        return stop

    def note_prefill(self, request: Request) -> None:
        """The request is in an iteration that computes a part of its prompt."""
        place = request.num_computed // self._block_size
        if self._is_on and (place + 1) * self._block_size <= request.prompt_len:
            extend_hashes(request, self._block_size, place + 1)
            self._prefills[request.block_hashes[place]] = request

    def is_being_computed(self, request: Request) -> bool:
        """Whether an iteration in flight, or the one being planned, computes a prompt that has
        half of this request's uncached tokens in common, and at least `MIN_COMMON`: then it is
        better to wait for their KV than to compute it twice. Choices of one response, which have
        the same prompt object, wait for a single block: together they compute it many times."""
        place, size = request.found.num_matched, self._block_size
        if not self._prefills or place >= len(request.block_hashes):
            return False
        other = self._prefills.get(request.block_hashes[place])
        if other is None or other is request:
            return False
        cached = place * size
        common = _num_common(request.spec, other.spec, cached) // size * size - cached
        least = MIN_COMMON
        if other.spec.prompt is request.spec.prompt and not request.wants_prompt_logprobs:
            reusable = (request.num_tokens - 1) // size * size  # a request computes one at least
            least, common = size, min(common, reusable - cached)
        return common >= least and 2 * common >= request.num_tokens - cached


def _num_common(one: RequestSpec, other: RequestSpec, start: int) -> int:
    """The length of the common prefix of two prompts, which is at least `start`. Tokens that stand
    for other content are in it only if the content is the same."""
    tokens, others = one.prompt, other.prompt
    length = min(len(tokens), len(others))
    if one.spans != other.spans:
        length = min(length, *(span.start for span in {*one.spans} ^ {*other.spans}))
    if tokens is others:
        return length
    while start < length and tokens[start : start + CHUNK] == others[start : start + CHUNK]:
        start += CHUNK
    while start < length and tokens[start] == others[start]:
        start += 1
    return min(start, length)
