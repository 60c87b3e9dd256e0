"""SGLang's server with a scheduler that computes nothing; SGLang's own Python runs it.

    PYTHONPATH=. python -m examples.benchmarks.server.front_ends.sglang_scheduler
        --model-path CHECKPOINT --device cpu --port 8210

The HTTP server, the tokenizer's manager and the detokenizer's process are SGLang's own; the
scheduler's process only answers their messages.
"""

import os
import sys
from array import array
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import transformers.utils  # noqa: F401 # asks whether there is a torchvision

# The wheel of torchvision on PyPI does not fit torch's build for CPUs; only images need it.
for part in ("", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2"):
    sys.modules[f"torchvision{part}"] = MagicMock()

import zmq  # noqa: E402
from sglang.srt.entrypoints.http_server import launch_server  # noqa: E402
from sglang.srt.managers.io_struct import (  # noqa: E402
    AbortReq,
    BatchTokenIDOutput,
    TokenizedGenerateReqInput,
    sock_recv,
    sock_send,
    wrap_as_pickle,
)
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402
from sglang.srt.utils import kill_process_tree  # noqa: E402

from examples.benchmarks.server.front_ends.pace import Pace  # noqa: E402

CONTEXT = 5  # prompt tokens that the detokenizer gets before the first token
NO_LISTS = (
    "input_token_logprobs_val", "input_token_logprobs_idx", "output_token_logprobs_val",
    "output_token_logprobs_idx", "input_top_logprobs_val", "input_top_logprobs_idx",
    "output_top_logprobs_val", "output_top_logprobs_idx", "input_token_ids_logprobs_val",
    "input_token_ids_logprobs_idx", "output_token_ids_logprobs_val",
    "output_token_ids_logprobs_idx", "output_token_entropy_val", "output_token_sampling_mask",
    "output_hidden_states", "routed_experts", "indexer_topk", "placeholder_tokens_idx",
    "placeholder_tokens_val",
)  # fmt: skip


@dataclass(slots=True)
class Running:
    """A request that gets tokens."""

    asked: Any
    count: int = 0
    is_aborted: bool = False
    stats: Any = field(default_factory=SchedulerReqTimeStats)

    @property
    def reason(self) -> dict[str, Any] | None:
        """Why it ends, if it does."""
        if self.is_aborted:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        is_done = self.count >= self.asked.sampling_params.max_new_tokens
        return {"type": "length", "length": self.count} if is_done else None


def output_of(rows: list[Running], token: int) -> Any:
    """The message of one more token for each of the requests, with the fields that SGLang's
    scheduler sets."""
    ids = [array("q", [] if row.is_aborted else [token]) for row in rows]
    for row, given in zip(rows, ids, strict=True):
        row.count += len(given)
    num_rows = len(rows)
    return BatchTokenIDOutput(
        rids=[row.asked.rid for row in rows],
        http_worker_ipcs=[row.asked.http_worker_ipc for row in rows],
        finished_reasons=[row.reason for row in rows],
        decoded_texts=[""] * num_rows,
        decode_ids=[
            given if row.count > 1 else row.asked.input_ids[-CONTEXT:] + given
            for row, given in zip(rows, ids, strict=True)
        ],
        read_offsets=[min(CONTEXT, len(row.asked.input_ids)) for row in rows],
        output_ids=ids,
        skip_special_tokens=[True] * num_rows,
        spaces_between_special_tokens=[True] * num_rows,
        no_stop_trim=[False] * num_rows,
        prompt_tokens=[len(row.asked.input_ids) for row in rows],
        reasoning_tokens=[0] * num_rows,
        completion_tokens=[row.count for row in rows],
        cached_tokens=[0] * num_rows,
        cached_tokens_details=[None] * num_rows,
        image_tokens=[0] * num_rows,
        audio_tokens=[0] * num_rows,
        video_tokens=[0] * num_rows,
        retraction_counts=[0] * num_rows,
        dp_ranks=[None] * num_rows,
        time_stats=wrap_as_pickle([row.stats for row in rows]),
        **dict.fromkeys(NO_LISTS),
    )


def schedule(server_args: Any, ports: Any, *places: Any) -> None:
    """The scheduler's process: one token for each request in every iteration."""
    context = zmq.Context()
    incoming, outgoing = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for each in (incoming, outgoing):
        each.set_hwm(0)
    incoming.connect(ports.scheduler_input_ipc_name)
    outgoing.connect(ports.detokenizer_ipc_name)
    startup = {"load_weight": 0.0, "kv_cache_allocation": 0.0, "scheduler_e2e": 0.0}
    places[-1].send(
        {"status": "ready", "max_total_num_tokens": 1 << 24, "max_req_input_len": 4000}
        | {"startup_time": startup | {"cuda_graph": {}}, "hicache_object_layout": None}
    )
    running: dict[str, Running] = {}
    pace = Pace()
    while True:
        while not running or incoming.poll(0):
            receive(sock_recv(incoming), running)
        pace.wait()
        while incoming.poll(0):
            receive(sock_recv(incoming), running)
        rows = list(running.values())
        if rows:
            sock_send(outgoing, output_of(rows, pace.token))
        for row in rows:
            if row.reason is not None:
                del running[row.asked.rid]


def receive(message: Any, running: dict[str, Running]) -> None:
    """Add or abort requests; other messages need no answer."""
    match message:
        case TokenizedGenerateReqInput():
            running[message.rid] = Running(message)
        case AbortReq():
            for name, row in running.items():
                row.is_aborted |= message.abort_all or name == message.rid


if __name__ == "__main__":
    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=schedule)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
