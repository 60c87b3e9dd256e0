"""A small load with every kind of event, and its schedule in virtual time as a recording.

python -m tests.replays.playing      writes the golden schedules beside this file again, and
those of policies under research beside their tests
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from engine.control.admission import Admission
from engine.control.event_recorder import EventRecorder, RecordingHeader, Row, render
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.kv_shape import KVShape
from engine.policy import POLICIES, RESEARCH, Policy, PolicySettings, build
from engine.ports import Cost
from engine.request import RequestSpec
from engine.research.policies import ORACLES
from engine.simulated.replay import END, RecordedRequest
from engine.simulated.run import Setup, simulate
from engine.simulated.trace import GREEDY

GOLDEN = Path(__file__).parent
OF_RESEARCH = GOLDEN.parent / "engine" / "research" / "replays"
NUM_REQUESTS = 14
BLOCK_SIZE = 4
NUM_BLOCKS = 18
COST = CostModel.linear(per_step=0.5, per_token=0.125, per_slot=0.0)  # exact in binary
POLICY = PolicySettings(starvation_seconds=9.0, seats=4, base_quantum=0.75)


def header(policy: str, admission: Admission) -> RecordingHeader:
    settings = SchedulerSettings(
        max_model_len=72,
        max_batch_size=4,
        max_batch_tokens=24,
        admission=admission,
        max_step_overs=3,
        max_preemptions=2,
        scan_limit=3,
        max_step_seconds=2.5,
    )
    return RecordingHeader(policy, POLICY, settings, KVShape(NUM_BLOCKS, BLOCK_SIZE), 1, COST)


def load() -> list[RecordedRequest]:
    """Requests of chats, some with a deadline, a priority or a tenant; some are cancelled, and some
    outputs end before `max_tokens`."""
    random = Random(11)
    arrivals, at = [], 0.0
    for number in range(NUM_REQUESTS):
        at += random.choice([0.0, 0.5, 1.25, 2.0]) if number else 0.0
        max_tokens = random.choice([2, 9, 16, 25])
        chat = random.choice([0, 100, 200])  # shared prefix
        own = 1000 + 100 * number
        prompt_len = random.choice([3, 9, 22, 37])
        shared = random.choice([0, 2, 4])
        ends_after = random.choice([None, None, 1 + max_tokens // 2])
        params = RequestSpec(
            prompt=(),
            max_tokens=max_tokens,
            sampling=GREEDY,
            end_ids=frozenset({END}),
            priority=random.choice([0, 0, -1, 5]),
            tenant=random.choice(["", "a", "b"]),
            ttft_deadline=random.choice([None, None, 6.0]),
            deadline=random.choice([None, None, None, 15.0]),
        )
        arrivals.append(
            RecordedRequest(
                at=at,
                prompt_len=prompt_len,
                output_len=ends_after or max_tokens,
                patience=random.choice([None, None, None, None, 9.25]),
                params=params,
                names=(*range(chat, chat + shared), *range(own, own + 20)),
                block_size=BLOCK_SIZE,
                number=number,
                ends_after=ends_after,
            )
        )
    return arrivals


def lines(header: RecordingHeader, arrivals: Sequence[RecordedRequest]) -> list[str]:
    """The recording of these arrivals, served with these settings in virtual time."""
    names: dict[bytes | str, int] = {}

    def name(what: bytes | str) -> int:
        return names.setdefault(what, len(names))

    written = [header.line()]

    def write(row: Row) -> None:
        written.append(render(row, name))

    setup = Setup(
        label="golden",
        settings=header.scheduler,
        policy=partial(policy, header),
        cost=header.cost,
        num_slots=header.kv.num_blocks * header.kv.block_size,
        block_size=header.kv.block_size,
        stages=header.depth,
        is_oracle=header.policy in ORACLES,
        lookahead=header.lookahead,
        num_host_slots=header.kv.num_host_blocks * header.kv.block_size,
        slot_seconds=1 / 64,
    )
    simulate(setup, arrivals, EventRecorder(write, header.kv.block_size))
    return written


def policy(header: RecordingHeader, cost: Cost) -> Policy:
    return build(header.policy, cost, header.policies, serves=False)


def with_host(header: RecordingHeader) -> RecordingHeader:
    return replace(header, kv=replace(header.kv, num_host_blocks=12))


def headers() -> dict[str, RecordingHeader]:
    """The settings of each golden schedule, by its name."""
    found = {
        f"{name}_{admission.value}": header(name, admission)
        for name in (*POLICIES, *RESEARCH)
        for admission in Admission
    }
    grow = header("mlfq", Admission.GROW)
    fcfs = header("fcfs", Admission.GROW)
    found["fcfs_goal"] = replace(fcfs, scheduler=replace(fcfs.scheduler, itl_goal=0.75))
    found["mlfq_goal"] = replace(grow, policies=replace(POLICY, ttft_goal=4.0))
    found["mlfq_fair"] = replace(grow, policies=replace(POLICY, fair_keys=True))
    found["mlfq_host"] = with_host(grow)
    found["mlfq_ahead"] = replace(grow, lookahead=1)
    found["mlfq_stages"] = replace(with_host(grow), depth=2, lookahead=1)
    return found


def main() -> None:
    for name, terms in headers().items():
        folder = OF_RESEARCH if terms.policy in RESEARCH else GOLDEN
        (folder / f"{name}.jsonl").write_text("\n".join(lines(terms, load())) + "\n")


if __name__ == "__main__":
    main()
