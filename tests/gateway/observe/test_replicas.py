"""What is observed of a model with two replicas, one of which dies, in virtual time."""

import asyncio

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.iteration import ObserverGroup
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy import build
from engine.replicas.replica import QueueDelay, Replica
from engine.replicas.replicas import Replicas
from engine.request import RequestSpec
from engine.simulated.virtual_loop import run_virtual
from engine.step import SamplingParams
from gateway.observe.explanation import explain
from gateway.observe.exposition import Exposition
from gateway.observe.live import LiveView
from gateway.observe.metrics import LoraUsage, Metrics, StepMetrics
from gateway.observe.readings import Readings, ServerReadings
from gateway.observe.request_log import RequestLog
from gateway.observe.timelines import Timelines
from gateway.store.store import open_store
from gateway.store.usage import StoreLimits
from tests.fuzz.groups.case import MortalExecutor, Tally

COST = CostModel.linear(per_step=1.0, per_token=0.0, per_slot=0.0)
SEATS = 2
GREEDY = SamplingParams(temperature=0.0)


class Rig:
    """A model with two replicas and all that observes it; must be built on a loop."""

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time
        self.metrics, self.live, self.timelines = Metrics(), LiveView(), Timelines()
        self.executors = [MortalExecutor(COST, Tally(), lambda: True) for _ in range(2)]
        parts = (self.timelines, self.timelines.beside())
        members = [
            self._replica(executor, part)
            for executor, part in zip(self.executors, parts, strict=True)
        ]
        self.replicas = Replicas(members, self.clock)
        first, other = [member.scheduler for member in members]
        self.readings = Readings(self.metrics, first, LoraUsage(), (other,))

    def _replica(self, executor: MortalExecutor, timelines: Timelines) -> Replica:
        cost, delay = LiveCost(COST), QueueDelay(COST, SEATS)
        metrics = self.metrics
        parts = metrics, StepMetrics(metrics), metrics.requests, self.live, timelines, delay
        scheduler = IterationScheduler(
            SchedulerSettings(1000, max_batch_size=SEATS),
            KVLedger(KVShape(100, 4)),
            build("fcfs", cost),
            ObserverGroup(*parts),
            cost,
        )
        timelines.attach(scheduler)
        return Replica(Engine(scheduler, executor, self.clock), delay)

    async def generate(self, label: str, max_tokens: int) -> None:
        spec = RequestSpec((1, 2, 3, 4, 5, len(label)), max_tokens, GREEDY, label=label)
        with self.replicas.stream(spec) as stream:
            while (await stream.next()).finish is None:
                pass

    def snapshot(self) -> dict[str, object]:
        return self.live.snapshot(self.replicas, self.readings, 0.0, self.clock())

    async def page(self) -> str:
        store = open_store(None, StoreLimits())
        server = ServerReadings(self.metrics, store.database, RequestLog(self.clock))
        exposition = Exposition(server, lambda: {"m": self.readings}, self.clock)
        rendering = asyncio.create_task(exposition.render())
        text = (await rendering).decode()
        store.close()
        return text


async def scene() -> None:
    rig = Rig()
    running = asyncio.create_task(rig.replicas.run())
    work = [asyncio.create_task(rig.generate("a" * n, 8 * n)) for n in range(1, 6)]
    await asyncio.sleep(3.5)
    snapshot = rig.snapshot()
    assert snapshot["counts"] == {"running": 4, "waiting": 1, "swapped": 0}
    assert snapshot["num_requests"] == 5
    assert rig.readings.num_blocks == 200
    rig.executors[0].kill()
    await asyncio.sleep(0.1)
    rows = rig.snapshot()["requests"]
    assert isinstance(rows, list)
    assert "worker restart" in {row["waits_for"] for row in rows}
    assert rig.snapshot()["worker_state"] == "running"
    await asyncio.gather(*work[:3])
    for executor in rig.executors:  # one after the other, so that requests move
        executor.kill()
        await asyncio.sleep(2.0)
    await asyncio.gather(*work)

    page = await rig.page()
    assert "podway_worker_restarts_total 3.0" in page
    assert 'podway_requests_total{outcome="finished"} 5.0' in page
    assert "podway_output_tokens_total 120.0" in page
    assert "podway_orphan_blocks 0.0" in page
    assert 'vllm:num_requests_running{model_name="m"} 0.0' in page
    restarted = 0
    for n in range(1, 6):
        (timeline,) = rig.timelines.find("a" * n, "")
        restarted += timeline.num_restarts
        blocked, _ = timeline.waited(rig.clock())
        seconds = sum(timeline.blocked.values())
        admitted = timeline.request.times.admitted_at
        assert admitted is not None
        assert abs(seconds - (admitted - timeline.request.times.arrived_at)) < 1e-6, (n, blocked)
        assert explain([timeline], "a" * n, rig.timelines, rig.clock())
    assert restarted >= 2
    assert rig.replicas.moves.num_moved > 0
    running.cancel()


def test_counts_states_and_explanations_are_those_of_all_replicas() -> None:
    run_virtual(scene())
