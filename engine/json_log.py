"""Logs of one JSON object per line, in the server's process and in its workers."""

import json
import logging


class JsonFormatter(logging.Formatter):
    """One JSON object per line. A record with `fields`, such as a request's line, has them in it
    instead of a message. `worker` is the process id of a worker."""

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._origin = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._origin,
        }
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_json_logs(level: int | str, worker: int | None = None) -> None:
    """Write all logs of this process to stderr as JSON, warnings of Python code too."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(worker))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
