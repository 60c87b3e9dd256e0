"""What can go wrong, as one tree. Everything that a caller can cause is an `EngineError`.

EngineError
├── InvalidRequest          the request can never be served as it stands
│   └── ContextTooLong      prompt + output do not fit the context or the KV cache
├── Overloaded              the queue is full; come back in `retry_after` seconds
│   └── DeadlineUnmeetable  too much is queued to answer before the request's own deadline
├── Unavailable             draining, or no worker is alive
├── RequestFailed           accepted, and did not come to its end
│   ├── RequestCancelled    its caller asked for its end
│   ├── DeadlineExceeded    its own deadline came before the end of the answer
│   ├── NoAllowedToken      what it demands of its answer leaves no token to draw
│   ├── RowFailed           the model computed nothing usable for it, but did for others
│   ├── StepFailed          the iteration that it was part of raised an error
│   └── WorkerLost          a worker process died or left the connection
└── StartupError          settings, checkpoint or machine cannot serve: one readable line
"""


class EngineError(Exception):
    """Base of all errors that cross from the engine to its caller."""


class InvalidRequest(EngineError):
    """The request itself is wrong; `param` names the field as the caller spelled it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """Prompt and requested output need more slots than there are."""

    def __init__(self, prompt_len: int, max_tokens: int, limit: int, what: str) -> None:
        super().__init__(
            f"This model's {what} is {limit} tokens. However, you requested "
            f"{prompt_len + max_tokens} tokens ({prompt_len} in the prompt, {max_tokens} in the "
            "completion). Please reduce the length of the prompt or of the completion."
        )


class Overloaded(EngineError):
    """The queue is full; `retry_after` is the forecast in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineUnmeetable(Overloaded):
    """The forecast says that the request would be late; in `retry_after` seconds it might not."""


class Unavailable(EngineError):
    """The server takes no requests now: it drains, or it has no worker.

    `retry_after` is the forecast in seconds; None where waiting here does not help.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestFailed(EngineError):
    """An accepted request did not come to its end: by default through our fault."""


class DeadlineExceeded(RequestFailed):
    """The request's deadline passed; what it had produced by then was delivered."""


class RequestCancelled(RequestFailed):
    """Its caller cancelled it by name; what it had produced by then was delivered."""


class NoAllowedToken(RequestFailed):
    """The request's own demands (bans, grammar) leave no token that could come next."""


class RowFailed(RequestFailed):
    """The model's numbers for this request are no numbers; its batch mates have their tokens."""


class StepFailed(RequestFailed):
    """The iteration raised in the worker; its batch is lost, the worker is not."""


class WorkerLost(RequestFailed):
    """A worker process is gone, and with it everything that was on its device."""


class StartupError(EngineError):
    """A setting, the checkpoint or the machine does not allow a start."""
