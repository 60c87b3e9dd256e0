"""Terminal output of `podway serve`: loading progress, and a banner once the server is ready.

Progress bars only on a terminal; plain lines elsewhere.
"""

import json
import logging
import shlex
from collections.abc import Iterable, Mapping
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from engine.pooling import PoolingReport
from engine.worker_settings import WorkerReport
from gateway.groups.group import Group
from gateway.serve.cores import count_replicas
from gateway.settings.settings import Settings
from gateway.version import podway_version

logger = logging.getLogger(__name__)
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class LoadingBars:
    """One bar per label while a worker loads; called with (label, done, total).

    With `logs`, progress is lines of the log, also on a terminal.
    """

    def __init__(self, stream: TextIO, *, logs: bool = False) -> None:
        self._logs = logs
        self._console = Console(file=stream, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            console=self._console,
            transient=True,
            disable=logs or not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bars from the screen. Idempotent."""
        self._bars.stop()

    def __call__(self, label: str, done: int, total: int) -> None:
        is_new = label not in self._tasks
        if is_new:
            self._tasks[label] = self._bars.add_task(label, total=total)
        self._bars.update(self._tasks[label], completed=done, total=total)
        if not is_new and done < total:
            return
        line = f"{label}: {done} of {total}"
        if self._logs:
            logger.info("%s", line)
        elif not self._console.is_terminal:
            self._console.print(line, markup=False, soft_wrap=True)


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """The server's URL for clients on this machine."""
    host = _WILDCARDS.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def banner(
    url: str, model: str, report: WorkerReport, settings: Settings, more: Mapping[str, str]
) -> str:
    """The lines that are printed when the server is ready; `more` are further lines, by label."""
    bounds = settings.scheduler
    weights = "" if report.weights == report.dtype else f" with {report.weights} weights"
    facts = {
        "model": f"{report.architecture}, {_short(report.num_parameters)} parameters, "
        f"{report.dtype}{weights} on {report.device}, context {report.max_model_len:,} tokens",
        **({} if report.pooling is None else {"task": _pooling(report.pooling)}),
        "KV cache": _kv_cache(report),
        "workers": f"{_workers(settings)}, {report.threads} threads, "
        f"{report.kernels}, attention {report.attention}",
        "schedule": f"policy {settings.schedule.policy}, admission {bounds.admission.value}, "
        f"at most {bounds.max_batch_size} requests and {bounds.max_batch_tokens:,} tokens "
        "per iteration",
        **more,
    }
    title = f"Podway {podway_version()} serves {model} at {url}"
    lines = [f"  {name:9} {fact}" for name, fact in facts.items()]
    has_key = bool(settings.access.api_key or settings.access.api_key_file)
    task = "generate" if report.pooling is None else report.pooling.task
    example = curl_line(url, model, task, with_key=has_key)
    return "\n".join([title, *lines, "", f"  {example}", "", ""])


def models_banner(url: str, groups: Iterable[Group]) -> str:
    """The lines that are printed when a server of several models is ready."""
    table = [
        f"  {group.name}  {group.status.value}, at most {group.num_bytes / (1 << 20):,.0f} MiB"
        for group in groups
    ]
    title = f"Podway {podway_version()} serves {len(table)} models at {url}"
    return "\n".join([title, *table, "", f"  curl {url}/v1/models", "", ""])


_EXAMPLES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "generate": (
        "/v1/chat/completions",
        {"stream": True, "messages": [{"role": "user", "content": "Hello! Who are you?"}]},
    ),
    "embed": ("/v1/embeddings", {"input": "Hello!"}),
    "score": ("/v1/rerank", {"query": "What is a cat?", "documents": ["An animal.", "A city."]}),
}


def curl_line(url: str, model: str, task: str = "generate", *, with_key: bool) -> str:
    """A curl command that uses the model for its task; a chat completion is streamed."""
    path, fields = _EXAMPLES[task]
    body = {"model": model, **fields}
    words = ["curl", "-N", f"{url}{path}", "-H", "content-type: application/json"]
    line = shlex.join([*words, "-d", json.dumps(body)])
    return line + ' -H "authorization: Bearer $KEY"' if with_key else line


def _kv_cache(report: WorkerReport) -> str:
    """Its size; an encoder has none."""
    if not report.windows:
        return "none: prompts are computed in one iteration each"
    num_slots = report.num_blocks // len(report.windows) * report.block_size
    megabytes = report.num_blocks * report.bytes_per_block / 2**20
    kv_dtype = "" if report.kv_dtype == report.dtype else f" of {report.kv_dtype}"
    is_short = report.windows == (None,) and num_slots < report.max_model_len
    limit = ", the longest request (--kv-memory)" if is_short else ""
    size = f"{num_slots:,} slots in blocks of {report.block_size}{limit}"
    return f"{size}, {megabytes:,.0f} MiB{kv_dtype}"


def _pooling(pooling: PoolingReport) -> str:
    """The kind of vectors, and how they are made."""
    if pooling.task == "embed":
        normalized = "normalized" if pooling.is_normalized else "not normalized"
        return f"embeddings of {pooling.size} numbers, {pooling.method} pooling, {normalized}"
    scores = "1 score" if pooling.size == 1 else f"{pooling.size} scores"
    return f"{scores} per pair of texts, {pooling.method} pooling"


def _workers(settings: Settings) -> str:
    stages, ranks, count = (
        settings.workers.num_stages,
        settings.workers.num_ranks,
        count_replicas(settings),
    )
    workers = "1 worker" if stages * ranks == 1 else f"{stages} stages × {ranks} ranks"
    return workers if count == 1 else f"{count} replicas of {workers}"


def _short(number: int) -> str:
    """3,100,000 as 3.1 M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
