"""The LoRA adapters that are served: their names are names of models.

    load ──workers read and check the files──▶ served ──unload──▶ draining ──last request──▶ freed

An adapter that is unloaded or replaced gets no new requests from that moment on; the workers free
it when its last request has ended.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from engine.errors import InvalidRequest, RequestFailed, StartupError, Unavailable, WorkerLost
from engine.lora import LoraAdapter, LoraReport, LoraSpec
from engine.ports import LoraLoader
from gateway.errors import LoraNotFound
from gateway.observe.metrics import LoraUsage
from gateway.schema.decoding import invalid

MAX_NAME_LEN = 256

logger = logging.getLogger(__name__)


class ServedLora(NamedTuple):
    """An adapter under its name; `path` is its directory and `created` Unix seconds."""

    adapter: LoraAdapter
    path: str
    created: int


class LoraRegistry:
    """Loads and unloads adapters in the workers. `served` has those that requests may name."""

    def __init__(
        self,
        loader: LoraLoader,
        usage: LoraUsage,
        base_names: Sequence[str],
        on_lost: Callable[[int, RequestFailed], None],
    ) -> None:
        """`base_names` are the names of the base model, which adapters may not have. `on_lost` ends
        the requests of an adapter that restarted workers could not load again."""
        self.served: dict[str, ServedLora] = {}
        self._loader = loader
        self._usage = usage
        self._base_names = base_names
        self._on_lost = on_lost
        self._num_loaded = 0  # in the workers, draining ones included
        self._last_id = 0
        self._loading = asyncio.Lock()
        self._draining: set[asyncio.Task[None]] = set()
        loader.watch_loras(self._lost)

    def start(self, specs: Iterable[LoraSpec], reports: Iterable[LoraReport], now: int) -> None:
        """Serve the adapters that were loaded with the model. Raises `StartupError`."""
        for spec, report in zip(specs, reports, strict=True):
            if spec.name in self._base_names:
                raise StartupError(f"--lora {spec.name!r} is a name of the base model")
            self._serve(spec, report, now)

    async def load(self, name: str, path: str, now: int, *, replaces: bool) -> None:
        """Load an adapter and serve it under `name`, instead of the one with that name if it
        `replaces`.

        Raises `InvalidRequest` if the name is taken, there is no room, or the files are not those
        of a LoRA for this model; `Unavailable` while workers restart.
        """
        async with self._loading:
            self._check_load(name, replaces=replaces)
            self._last_id += 1
            try:
                spec = LoraSpec(self._last_id, name, absolute(path))
            except ValueError as error:
                raise invalid("lora_path", str(error)) from error
            try:
                report = await self._loader.load_lora(spec)
            except WorkerLost as error:
                raise Unavailable(f"The worker was lost: {error}") from error
            if report.error:
                raise InvalidRequest(f"{report.error}.", "lora_path")
            before = self.served.get(name)
            self._serve(spec, report, now)
            if before is not None:
                self._drain(before.adapter)
        logger.info("lora=%s loaded path=%s digest=%s", name, spec.path, report.digest[:16])

    def _check_load(self, name: str, *, replaces: bool) -> None:
        check_name(name)
        if name in self._base_names:
            raise InvalidRequest(f"{name!r} is a name of the base model.", "lora_name")
        if name in self.served and not replaces:
            raise InvalidRequest(
                f"The LoRA adapter {name!r} has already been loaded; 'load_inplace' replaces it.",
                "lora_name",
            )
        most = self._usage.max_loras
        if self._num_loaded >= most:
            raise InvalidRequest(
                f"{self._num_loaded} LoRA adapters are loaded, and --max-loras allows {most}. "
                "Unload one first.",
                "lora_name",
            )

    async def unload(self, name: str) -> None:
        """Serve no new request of this name, wait for those that run, and free the adapter.

        Raises `LoraNotFound`.
        """
        served = self.served.pop(name, None)
        if served is None:
            raise LoraNotFound(name)
        await asyncio.shield(self._drain(served.adapter))
        logger.info("lora=%s unloaded", name)

    def _serve(self, spec: LoraSpec, report: LoraReport, now: int) -> None:
        adapter = LoraAdapter(spec.lora_id, spec.name, report.digest)
        self.served[spec.name] = ServedLora(adapter, spec.path, now)
        if (base := other_base(Path(spec.path), self._base_names)) is not None:
            logger.warning(
                "the LoRA adapter %r was trained on %s, and this server serves %s",
                spec.name,
                base,
                self._base_names[0],
            )
        self._num_loaded += 1
        self._last_id = max(self._last_id, spec.lora_id)

    def _drain(self, adapter: LoraAdapter) -> asyncio.Task[None]:
        task = asyncio.create_task(self._free(adapter), name=f"unload {adapter.name}")
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)
        return task

    async def _free(self, adapter: LoraAdapter) -> None:
        await self._usage.wait_until_idle(adapter.lora_id)
        self._loader.unload_lora(adapter.lora_id)
        self._num_loaded -= 1

    def _lost(self, report: LoraReport) -> None:
        """Restarted workers do not have this adapter: its requests end with an error."""
        for name, served in list(self.served.items()):
            if served.adapter.lora_id == report.lora_id:
                del self.served[name]
                self._drain(served.adapter)
        self._on_lost(report.lora_id, RequestFailed(report.error))


def absolute(path: str) -> str:
    """A path for worker processes, whose directory may be another one. Raises `ValueError`."""
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:  # no such user after ~
        raise ValueError(str(error)) from error


def check_name(name: str) -> None:
    """Raise `InvalidRequest` for a name that lists of names or logs could not show."""
    if not 0 < len(name) <= MAX_NAME_LEN or "," in name or not name.isprintable():
        raise InvalidRequest(
            f"'lora_name' must have 1 to {MAX_NAME_LEN} printable characters and no comma.",
            "lora_name",
        )


def other_base(adapter: Path, names: Sequence[str]) -> str | None:
    """The base model that an adapter's files name, unless it is one of `names`, of which the last
    parts count, or unknown."""
    try:
        config = orjson.loads((adapter / "adapter_config.json").read_bytes())
        base = config.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):  # not JSON, or a NUL in the path
        return None  # the workers report files that cannot be read
    if not isinstance(base, str) or not base:
        return None
    known = {Path(name).name.casefold() for name in names}
    return None if Path(base).name.casefold() in known else base
