"""A pipeline over two nodes of a Ray cluster, one stage on each; one node's worker is killed.

Both nodes are created on this machine, with `pip install podway[ray]`. On a real cluster
`podway serve MODEL --launcher ray --pipeline-stages 2` is enough.
"""

import asyncio
import os
import signal
import time

from ray.cluster_utils import Cluster

import adapters
from adapters.cluster.ray import RayLauncher
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import FinishReason, RequestSpec
from engine.step import SamplingParams
from engine.transport.launcher import Launcher
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from engine.worker_settings import WorkerSettings

WORKER = WorkerSettings(f"{adapters.__path__[0]}/builtin")
SPEC = RequestSpec(tuple(range(300, 340)), max_tokens=60, sampling=SamplingParams(temperature=0))


async def tokens_of(engine: Engine, pid: int | None) -> list[int]:
    """The tokens of one request; the process `pid` is killed after 20 of them."""
    tokens: list[int] = []
    with engine.stream(SPEC) as stream:
        finish: FinishReason | None = None
        while finish is None:
            new, finish, *_ = await stream.next()
            tokens += new
            if pid and len(tokens) >= 20:
                os.kill(pid, signal.SIGKILL)
                pid = None
    return tokens


async def run(settings: MultiprocessSettings, launcher: Launcher | None) -> list[int]:
    """The tokens from workers that `launcher` starts, or from local ones without a kill."""
    executor = MultiprocessExecutor(WORKER, settings, launcher=launcher)
    try:
        report = await executor.start(lambda what, done, total: None)
        limits = SchedulerSettings(max_model_len=report.max_model_len)
        ledger = KVLedger(KVShape(report.num_blocks, report.block_size))
        scheduler = IterationScheduler(limits, ledger, FirstComeFirstServed())
        engine = Engine(scheduler, executor, time.perf_counter)
        print(f"{len(executor.pids)} worker(s)")
        running = asyncio.create_task(engine.run())
        tokens = await tokens_of(engine, executor.pids[-1] if launcher else None)
        running.cancel()
        print(f"{len(tokens)} tokens, {executor.num_restarts} restart(s)")
        return tokens
    finally:
        await executor.close()


def main() -> None:
    expected = asyncio.run(run(MultiprocessSettings(), None))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:  # each node has one CPU, which one stage fills
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        launcher = RayLauncher(MultiprocessSettings().worker, cluster.address, cpus=1)
        tokens = asyncio.run(run(MultiprocessSettings(num_stages=2, depth=2), launcher))
    finally:
        cluster.shutdown()
    print("the same tokens" if tokens == expected else "other tokens")


if __name__ == "__main__":
    main()
