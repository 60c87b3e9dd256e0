"""An executor for vLLM that computes nothing; vLLM's own Python imports it.

    PYTHONPATH=. vllm serve CHECKPOINT --distributed-executor-backend
        examples.benchmarks.server.front_ends.vllm_executor.PacedExecutor

vLLM's scheduler, its engine process and the messages of that process are its own.
"""

from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

from examples.benchmarks.server.front_ends.pace import Pace


class PacedExecutor(UniProcExecutor):  # type: ignore[misc] # vLLM has no types here
    """Loads the model, then gives every request the same token. A prompt must fit into one
    iteration."""

    _pace: Pace | None = None

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return False

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        if self._pace is None:
            self._pace = Pace()
        ids = list(scheduler_output.num_scheduled_tokens)
        if ids:
            self._pace.wait()
        token = self._pace.token
        places = {name: place for place, name in enumerate(ids)}
        output = ModelRunnerOutput(ids, places, [[token] for _ in ids])
        if not non_block:
            return output
        future: Future[Any] = Future()
        future.set_result(output)
        return future
