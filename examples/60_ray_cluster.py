"""A pipeline over the nodes of a Ray cluster: two nodes, one stage on each, and one of them dies.

    python examples/60_ray_cluster.py

Needs `pip install podway[ray]`. Both nodes are made on this machine; in a real cluster there is
nothing to make, and `podway serve MODEL --launcher ray --pipeline-stages 2` is all.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

from ray.cluster_utils import Cluster

import adapters
from adapters.cluster.ray import RayLauncher
from engine.control.scheduler import IterationScheduler, SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import FinishReason, RequestSpec
from engine.step import SamplingParams, WorkerReport, WorkerSettings
from engine.transport.launcher import Launcher
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings

MODEL = Path(adapters.__file__).parent / "builtin"
WORKER = WorkerSettings(str(MODEL), kv_slots=4096)
ASK = RequestSpec(
    prompt=tuple(range(300, 340)), max_tokens=60, sampling=SamplingParams(temperature=0)
)


def make_cluster() -> Cluster:
    """Two nodes of one CPU each, so that a stage of one CPU fills a node."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    return cluster


def make_engine(executor: MultiprocessExecutor, report: WorkerReport) -> Engine:
    scheduler = IterationScheduler(
        SchedulerSettings(max_model_len=report.max_model_len),
        KVLedger(report.num_blocks, report.block_size),
        FirstComeFirstServed(),
    )
    return Engine(scheduler, executor, time.perf_counter)


async def tokens_of(engine: Engine, kill_after: int | None, pid: int) -> list[int]:
    """One answer; after `kill_after` tokens the process `pid` is killed."""
    produced: list[int] = []
    with engine.stream(ASK) as stream:
        finish: FinishReason | None = None
        while finish is None:
            chunk = await stream.next()
            produced += chunk.tokens
            finish = chunk.finish
            if kill_after is not None and len(produced) >= kill_after:
                os.kill(pid, signal.SIGKILL)
                kill_after = None
    return produced


async def run(settings: MultiprocessSettings, launcher: Launcher | None, kills: bool) -> list[int]:
    """One answer from workers that this launcher starts."""
    executor = MultiprocessExecutor(WORKER, settings, launcher=launcher)
    try:
        report = await executor.start(lambda what, done, total: None)
        engine = make_engine(executor, report)
        print(f"{len(executor.pids)} worker(s), processes {executor.pids}")
        running = asyncio.create_task(engine.run())
        produced = await tokens_of(engine, 20 if kills else None, executor.pids[-1])
        running.cancel()
        print(f"{len(produced)} tokens, {executor.num_restarts} restart(s), now {executor.pids}")
        return produced
    finally:
        await executor.close()


def main() -> None:
    expected = asyncio.run(run(MultiprocessSettings(), None, kills=False))
    cluster = make_cluster()
    try:
        launcher = RayLauncher(MultiprocessSettings().worker, cluster.address, cpus=1)
        two_stages = MultiprocessSettings(num_stages=2, depth=2)
        produced = asyncio.run(run(two_stages, launcher, kills=True))
    finally:
        cluster.shutdown()
    print("the same tokens" if produced == expected else "other tokens")


if __name__ == "__main__":
    main()
