from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.kv.prefix import hash_blocks
from engine.kv_shape import KVShape
from engine.lora import LoraAdapter
from engine.policy.fcfs import FirstComeFirstServed
from engine.step import StepResult
from tests.scheduling import a_spec, planned, run_iteration

ONE, TWO = LoraAdapter(1, "one", "aa" * 32), LoraAdapter(2, "two", "bb" * 32)


def make() -> IterationScheduler:
    settings = SchedulerSettings(max_model_len=100, max_batch_size=8, max_batch_tokens=64)
    return IterationScheduler(settings, KVLedger(KVShape(100, 2)), FirstComeFirstServed())


def add(scheduler: IterationScheduler, lora: LoraAdapter | None, prompt_len: int = 5) -> None:
    scheduler.add(a_spec(prompt_len, 4, lora=lora), 0.0)


def plan(scheduler: IterationScheduler) -> list[tuple[int, int]]:
    """Plan and commit an iteration; adapter and number of tokens of each entry."""
    iteration = planned(scheduler)
    entries = iteration.step.entries
    for entry, request in zip(entries, iteration.requests, strict=True):
        lora = request.spec.lora
        assert entry.lora_id == (0 if lora is None else lora.lora_id)
    scheduler.commit(iteration, StepResult(iteration.step.step_id, (5,) * len(entries), 0.1), 0.1)
    return [(entry.lora_id, len(entry.tokens)) for entry in entries]


def test_rows_of_an_adapter_follow_one_another_among_decodes_and_among_prefills() -> None:
    scheduler = make()
    for number, lora in enumerate((ONE, None, TWO, ONE, None)):
        add(scheduler, lora, 5 + number)
    assert plan(scheduler) == [(0, 6), (0, 9), (1, 5), (1, 8), (2, 7)]
    add(scheduler, TWO, 11)
    add(scheduler, ONE, 20)
    decodes = [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1)]
    assert plan(scheduler) == [*decodes, (1, 20 - 8), (2, 11 - 6)]  # the rest is cached


def test_prefixes_are_shared_by_adapters_of_equal_bytes_only() -> None:
    def cached(first: LoraAdapter | None, second: LoraAdapter | None) -> int:
        scheduler = make()
        add(scheduler, first)
        while scheduler.pool:
            run_iteration(scheduler, 0.0)
        request = scheduler.add(a_spec(5, 4, lora=second), 0.0)
        run_iteration(scheduler, 0.0)
        return request.num_cached

    again = LoraAdapter(7, "another name", ONE.digest)
    reloaded = LoraAdapter(8, ONE.name, TWO.digest)
    assert cached(None, None) == cached(ONE, ONE) == cached(ONE, again) == 4
    assert cached(None, ONE) == cached(ONE, None) == cached(ONE, TWO) == cached(ONE, reloaded) == 0


def test_no_salt_can_imitate_an_adapter() -> None:
    adapted = hash_blocks("", (1, 2), 2, ONE.digest)
    for salt in ("", ONE.digest, bytes.fromhex(ONE.digest).decode("latin-1")):
        assert hash_blocks(salt, (1, 2), 2) != adapted
        assert hash_blocks(salt, (1, 2), 2, TWO.digest) != adapted
