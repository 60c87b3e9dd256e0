"""The replicas of a model: the part of the machine that each gets, and what all do together."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.loop import Engine
from engine.lora import LoraReport, LoraSpec
from engine.transport.multiprocess import MultiprocessExecutor
from engine.worker_settings import Tiers, WorkerReport, WorkerSettings
from gateway.serve.cores import cores_of_machine, divide


def settings_of_replicas(
    worker: WorkerSettings, count: int, *, is_local: bool = True
) -> list[WorkerSettings]:
    """The settings of each replica's workers: its cores, if they are of this machine, and an equal
    part of the memory."""
    if count == 1:
        return [worker]
    kv, tiers = worker.kv, worker.tiers
    part = replace(
        worker,
        kv=replace(
            kv,
            kv_slots=kv.kv_slots and -(-kv.kv_slots // count),
            kv_memory=kv.kv_memory and max(1, kv.kv_memory // count),
            kv_memory_limit=kv.kv_memory_limit and max(1, kv.kv_memory_limit // count),
        ),
        tiers=replace(
            tiers,
            host_kv_memory=tiers.host_kv_memory // count,
            disk_kv_memory=max(1, tiers.disk_kv_memory // count),
        ),
        num_replicas=count,
    )
    cores = divide(cores_of_machine(), count) if is_local else [()] * count
    return [
        replace(part, cores=own, tiers=_own_directory(part, number))
        for number, own in enumerate(cores)
    ]


def _own_directory(worker: WorkerSettings, number: int) -> Tiers:
    tiers = worker.tiers
    if not tiers.disk_kv:
        return tiers
    return replace(tiers, disk_kv=f"{tiers.disk_kv}/replica-{number}")


def like_first(
    worker: WorkerSettings, first: WorkerReport, before: int, *, is_local: bool = True
) -> WorkerSettings:
    """The settings of a further replica, whose KV cache has the size of the first one's. On the
    GPUs of this machine it has the next ones behind those of `before` workers, which are the first
    replica's last, of which the report is, and all others behind it."""
    if is_local and first.device != "cpu":
        last = int(first.device.partition(" ")[0].rpartition(":")[2])  # "cuda:0 (NVIDIA H100)"
        device = f"cuda:{last + before}"
        worker = replace(worker, kernels=replace(worker.kernels, device=device))
    if not first.windows:
        return worker
    slots = first.num_blocks * first.block_size
    kv = replace(worker.kv, kv_slots=slots, kv_memory=None, num_states=first.num_states)
    return replace(worker, kv=kv)


class LorasOfReplicas:
    """A `LoraLoader` of all replicas that are not lost for good: an adapter is loaded in all of
    them, or in none."""

    def __init__(
        self, engines: Sequence[Engine], executors: Sequence[MultiprocessExecutor]
    ) -> None:
        self._replicas = list(zip(engines, executors, strict=True))
        self._executors = executors

    async def load_lora(self, spec: LoraSpec) -> LoraReport:
        """The report has the error of a replica that cannot load it. Raises `WorkerLost`."""
        usable = [executor for engine, executor in self._replicas if engine.failure is None]
        usable = usable or [*self._executors]
        loading = (executor.load_lora(spec) for executor in usable)
        results = await asyncio.gather(*loading, return_exceptions=True)
        loaded = [isinstance(each, LoraReport) and not each.error for each in results]
        if all(loaded):
            answer = results[0]
        else:
            answer = results[loaded.index(False)]
            for executor, is_loaded in zip(usable, loaded, strict=True):
                if is_loaded:
                    executor.unload_lora(spec.lora_id)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def unload_lora(self, lora_id: int) -> None:
        """Free an adapter, which no step in flight uses, in all replicas."""
        for executor in self._executors:
            executor.unload_lora(lora_id)

    def watch_loras(self, on_lost: Callable[[LoraReport], object]) -> None:
        """Call `on_lost` for each adapter that a restarted replica could not load again."""
        for executor in self._executors:
            executor.watch_loras(on_lost)
