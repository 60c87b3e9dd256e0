from random import Random

import pytest

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import StepFailed
from engine.iteration import Iteration
from engine.kv.ledger import KVLedger
from engine.kv.lower_tiers import LowerTier
from engine.kv.prefix import hash_blocks
from engine.kv_shape import KVShape
from engine.policy import build
from engine.request import Abort, Request, RequestSpec, State
from engine.step import BlockMove, Direction, Page, RequestId, StepResult, Tier
from tests.scheduling import GREEDY, HAND_COST, planned

BLOCK = 4


class Rig:
    """A scheduler with a small device tier, whose workers know only which hash each block has."""

    def __init__(
        self,
        num_blocks: int = 6,
        host: int = 0,
        disk: int = 0,
        unreadable: frozenset[int] = frozenset(),
        **bounds: object,
    ) -> None:
        values = {"max_model_len": 64, "max_batch_size": 4, "max_batch_tokens": 64} | bounds
        settings = SchedulerSettings(**values)  # type: ignore[arg-type]
        self.ledger = KVLedger(KVShape(num_blocks, BLOCK, host, disk, saves_on_host=True))
        self.scheduler = IterationScheduler(settings, self.ledger, build("fcfs", HAND_COST))
        self.unreadable = unreadable  # disk slots
        self.loaded: list[tuple[Tier, int]] = []
        self.contents: dict[tuple[Tier, int], bytes] = {}

    def step(self) -> Iteration | None:
        """Run one iteration; what a load reads must be what was saved there."""
        iteration = self.scheduler.plan(0.0)
        if iteration is not None:
            self.commit(iteration)
        return iteration

    def commit(self, iteration: Iteration) -> None:
        """What the workers do, and its result."""
        unread = tuple(page for move in iteration.step.moves for page in self._make(move))
        samples = sum(entry.sample is not None for entry in iteration.step.entries)
        result = StepResult(iteration.step.step_id, (7,) * samples, 0.1, unread=unread)
        self.scheduler.commit(iteration, result, 0.0)
        self.ledger.check()
        self.scheduler.pool.check()

    def _make(self, move: BlockMove) -> list[Page]:
        blocks = memoryview(move.device).cast("i").tolist()
        slots = memoryview(move.host).cast("i").tolist()
        unread = []
        for number, (block, slot) in enumerate(zip(blocks, slots, strict=True)):
            name = move.hashes[16 * number : 16 * number + 16]
            if not name:  # of a request that is swapped
                continue
            if move.direction is Direction.OUT:
                self.contents[move.tier, slot] = name
            elif move.tier is Tier.DISK and slot in self.unreadable:
                unread.append(Page(move.kind, block))
            else:
                assert self.contents[move.tier, slot] == name
                self.loaded.append((move.tier, slot))
        return unread

    def serve(self, prompt: tuple[int, ...], max_tokens: int = 1) -> Request:
        request = self.scheduler.add(RequestSpec(prompt, max_tokens, GREEDY), 0.0)
        while not request.state.is_terminal:
            assert self.step() is not None
        while (iteration := self.scheduler.save()) is not None:
            for move in iteration.step.moves:
                self._make(move)
            result = StepResult(iteration.step.step_id, (), 0.1)
            self.scheduler.kv.finish(iteration, result)
            self.ledger.check()
        return request


def prompt(first: int, length: int) -> tuple[int, ...]:
    return tuple(range(first, first + length))


@pytest.mark.parametrize(("host", "disk"), [(0, 20), (20, 20)])
def test_an_evicted_prefix_is_loaded_instead_of_computed(host: int, disk: int) -> None:
    rig = Rig(host=host, disk=disk)
    rig.serve(prompt(100, 17))
    rig.serve(prompt(200, 21))  # evicts all of it
    again = rig.serve(prompt(100, 17))
    assert again.num_cached == 16
    assert {tier for tier, _ in rig.loaded} == {Tier.HOST if host else Tier.DISK}
    assert len(rig.loaded) == 4


def test_a_prefix_that_is_partly_on_the_device_is_completed_from_below() -> None:
    rig = Rig(disk=20)
    rig.serve(prompt(100, 17))
    rig.serve(prompt(200, 9))
    on_device = len([one for one in again_hashes(rig, 100, 17) if one in rig.ledger.prefixes])
    assert 0 < on_device < 4
    assert rig.serve(prompt(100, 17)).num_cached == 16
    assert len(rig.loaded) == 4 - on_device


def again_hashes(rig: Rig, first: int, length: int) -> list[bytes]:
    return hash_blocks("", prompt(first, length), BLOCK)


@pytest.mark.parametrize("trouble", ["unread", "failed", "cancelled", "lost", "none"])
def test_a_request_whose_entry_does_not_fit_beside_its_load_waits_for_it(trouble: str) -> None:
    unreadable = frozenset(range(20)) if trouble == "unread" else frozenset[int]()
    rig = Rig(num_blocks=8, disk=20, admission=Admission.REQUEST, max_batch_tokens=4)
    rig.serve(prompt(100, 17))
    rig.serve(prompt(200, 29))  # evicts all of it
    rig.unreadable = unreadable
    first = rig.scheduler.add(RequestSpec(prompt(300, 5), 1, GREEDY), 0.0)
    request = rig.scheduler.add(RequestSpec(prompt(100, 17), 1, GREEDY), 0.0)
    iteration = planned(rig.scheduler, 0.0)
    assert (iteration.requests, iteration.swapping) == ((first,), (request,))
    assert len(iteration.loads) == 4
    assert rig.scheduler.plan(0.0) is None  # its blocks are not there yet
    if trouble == "failed":
        rig.scheduler.fail(iteration, StepFailed("boom"), 0.0)
    elif trouble == "lost":
        rig.scheduler.lose_device([iteration], 0.0)
    else:
        if trouble == "cancelled":
            rig.scheduler.cancel(request, Abort.CLIENT_GONE, 0.0)
        rig.commit(iteration)
    rig.ledger.check()
    assert request.num_computed == (16 if trouble == "none" else 0) or request.state.is_terminal
    while rig.step() is not None:
        pass
    assert request.produced == (trouble != "cancelled")
    assert rig.ledger.num_leaked(()) == 0


def test_a_loaded_prefix_is_shared_once_its_step_has_returned() -> None:
    rig = Rig(disk=20)
    rig.serve(prompt(100, 17))
    rig.serve(prompt(200, 17))
    rig.serve(prompt(100, 20), max_tokens=2)
    rig.loaded.clear()
    assert rig.serve(prompt(100, 17)).num_cached == 16
    assert not rig.loaded


def test_a_copy_that_cannot_be_read_is_dropped_and_its_request_computed() -> None:
    rig = Rig(disk=20)
    rig.serve(prompt(100, 17))
    rig.serve(prompt(200, 17))
    slot = rig.ledger.blocks.disk.take(again_hashes(rig, 100, 17)[1])
    rig.ledger.blocks.disk.drop(again_hashes(rig, 100, 17)[1])
    rig.unreadable = frozenset({slot})
    request = rig.serve(prompt(100, 17), max_tokens=3)
    assert request.state is State.FINISHED
    assert request.output == [7, 7, 7]
    assert len(rig.ledger.blocks.disk) >= 8  # computed and saved again


def test_a_request_that_needs_prompt_logprobs_loads_nothing() -> None:
    rig = Rig(disk=20)
    rig.serve(prompt(100, 17))
    rig.serve(prompt(200, 17))
    spec = RequestSpec(prompt(100, 17), 1, GREEDY, prompt_logprobs=0)
    rig.scheduler.add(spec, 0.0)
    rig.scheduler.plan(0.0)
    assert not rig.loaded


def test_a_request_cancelled_while_its_copies_are_read_frees_everything() -> None:
    rig = Rig(disk=20)
    rig.serve(prompt(100, 17))
    rig.serve(prompt(200, 17))
    request = rig.scheduler.add(RequestSpec(prompt(100, 17), 5, GREEDY), 0.0)
    iteration = planned(rig.scheduler, 0.0)
    assert iteration.loads
    rig.scheduler.cancel(request, Abort.EXPLICIT, 0.0)
    rig.scheduler.commit(iteration, StepResult(iteration.step.step_id, (7,), 0.1), 0.0)
    rig.ledger.check()
    assert request.state is State.CANCELLED
    assert rig.ledger.num_held == 0


def test_the_disk_tier_survives_the_loss_of_the_worker_and_the_host_tier_does_not() -> None:
    rig = Rig(host=20, disk=20)
    rig.serve(prompt(100, 17))
    rig.scheduler.lose_device([], 0.0)
    rig.ledger.check()
    assert (len(rig.ledger.blocks.host.cached), len(rig.ledger.blocks.disk)) == (0, 4)
    rig.serve(prompt(100, 17))
    assert {tier for tier, _ in rig.loaded} == {Tier.DISK}


def test_a_save_that_is_lost_with_its_worker_is_no_copy() -> None:
    rig = Rig(disk=20)
    request = rig.scheduler.add(RequestSpec(prompt(100, 17), 1, GREEDY), 0.0)
    while not request.state.is_terminal:
        rig.step()
    iteration = rig.scheduler.save()
    assert iteration is not None
    assert rig.ledger.num_moving == 4
    rig.scheduler.lose_device([iteration], 0.0)
    rig.ledger.check()
    assert len(rig.ledger.blocks.disk) == 0


def test_contents_from_an_earlier_run_are_found() -> None:
    rig = Rig(disk=8)
    hashes = again_hashes(rig, 100, 17)
    rig.ledger.blocks.lower.restore_disk(b"".join([bytes(16), *hashes, bytes(16)]))
    rig.contents = {(Tier.DISK, number + 1): name for number, name in enumerate(hashes)}
    assert rig.serve(prompt(100, 17)).num_cached == 16


def test_swapped_requests_take_host_blocks_from_cached_prefixes() -> None:
    rig = Rig(host=4)
    rig.serve(prompt(100, 17))
    rig.serve(prompt(200, 17))
    assert len(rig.ledger.blocks.host.cached) == 4
    assert rig.ledger.blocks.host.num_free == 4
    assert rig.ledger.blocks.host.begin_write(RequestId(99), 3) is not None
    assert len(rig.ledger.blocks.host.cached) == 1
    rig.ledger.blocks.host.check()


def test_the_least_recently_used_copy_makes_room_unless_it_is_being_read() -> None:
    free = [1, 0]
    copies = LowerTier(free)
    for name in (b"a", b"b"):
        copies.put(name)
        copies.finish_put(name, is_complete=True)
    copies.take(b"a")
    assert copies.put(b"c") is not None
    assert b"b" not in copies
    assert copies.put(b"d") is None  # "a" is read and "c" is written
    copies.drop(b"a")
    assert copies.put(b"d") is not None
    assert b"a" not in copies


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_over_three_tiers_keeps_every_block_in_one_state(seed: int) -> None:
    """Every content that is loaded is the one that was saved (`Rig._make`), every request ends with
    its tokens, and no block is lost."""
    random = Random(seed)
    rig = Rig(num_blocks=10, host=random.choice([0, 3, 9]), disk=random.choice([0, 4, 30]))
    rig.unreadable = frozenset(random.sample(range(30), 6))
    live: list[Request] = []
    for _ in range(120):
        if random.random() < 0.4:
            length = random.randint(1, 24)
            spec = RequestSpec(
                prompt(100 * random.randint(1, 3), length), random.randint(1, 6), GREEDY
            )
            live.append(rig.scheduler.add(spec, 0.0))
        if live and random.random() < 0.05:
            rig.scheduler.cancel(random.choice(live), Abort.EXPLICIT, 0.0)
        rig.step()
    while rig.scheduler.pool:
        assert rig.step() is not None
    for request in live:
        assert request.state is State.CANCELLED or len(request.output) == request.spec.max_tokens
    assert rig.ledger.num_held == rig.ledger.num_moving == 0
