"""The tree of errors. Every error that a caller can cause is an `EngineError`.

EngineError
├── InvalidRequest          the request can never be served as it is
│   └── ContextTooLong      prompt + max_tokens exceed the context or the KV cache
├── Overloaded              the queue is full; retry after `retry_after` seconds
│   └── DeadlineUnmeetable  too many requests are queued to meet the request's deadline
├── Unavailable             no worker is alive
│   └── ShuttingDown        the server drains
├── RequestFailed           the request was accepted, but not finished
│   ├── RequestCancelled    its caller cancelled it by label
│   ├── DeadlineExceeded    its deadline passed before it finished
│   ├── NoAllowedToken      its own bans or grammar allow no next token
│   ├── RowFailed           the model's output for it is unusable, that of other requests is not
│   ├── StepFailed          an iteration that it was part of raised an error
│   └── WorkerLost          a worker process died or its connection was lost
└── StartupError            settings, checkpoint or machine do not allow to start
    └── KernelFaulted       a GPU kernel faulted while it was tried; a new start leaves it out
"""

SHUTDOWN_RETRY_SECONDS = 5.0  # a load balancer has turned to another server by then


class EngineError(Exception):
    """Base of all errors that the engine raises to its caller."""


class InvalidRequest(EngineError):
    """The request itself is wrong; `param` is the name of the field in the caller's request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """Prompt and `max_tokens` need more slots than the context or the KV cache, which have
    `limit`. A prompt that is pooled has `max_tokens` 0."""

    def __init__(self, prompt_len: int, max_tokens: int, limit: int, what: str) -> None:
        self.prompt_len = prompt_len
        self.max_tokens = max_tokens
        self.limit = limit
        if self.is_prompt_too_long and max_tokens:
            super().__init__(
                f"This model's {what} is {limit} tokens. However, the prompt has {prompt_len} "
                "tokens. Please reduce the length of the prompt."
            )
            return
        if not max_tokens:
            super().__init__(
                f"This model's {what} is {limit} tokens, but the input has {prompt_len} tokens. "
                "Please shorten the input, or set 'truncate_prompt_tokens'."
            )
            return
        super().__init__(
            f"This model's {what} is {limit} tokens. However, you requested "
            f"{prompt_len + max_tokens} tokens ({prompt_len} in the prompt, {max_tokens} in the "
            "completion). Please reduce the length of the prompt or of the completion."
        )

    @property
    def is_prompt_too_long(self) -> bool:
        """Whether no `max_tokens` would make the request fit."""
        return self.prompt_len >= self.limit


class Overloaded(EngineError):
    """The queue is full; it is expected to have room in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineUnmeetable(Overloaded):
    """The request is expected to miss its deadline now, but not in `retry_after` seconds."""


class Unavailable(EngineError):
    """The server accepts no requests now: it is shutting down, or no worker is alive.

    `retry_after` is the expected time in seconds until it does; None if it will not.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ShuttingDown(Unavailable):
    """The server accepts no requests any more; after a restart, or beside it, another one does."""

    def __init__(self, message: str = "The server is shutting down.") -> None:
        super().__init__(message, SHUTDOWN_RETRY_SECONDS)


class RequestFailed(EngineError):
    """An accepted request was not finished: unless a subclass says otherwise, a server error."""


class DeadlineExceeded(RequestFailed):
    """The request's deadline passed; tokens produced before that were delivered."""


class RequestCancelled(RequestFailed):
    """The caller cancelled the request by label; tokens produced before that were delivered."""


class NoAllowedToken(RequestFailed):
    """The request's own parameters (banned tokens, grammar) allow no next token."""


class RowFailed(RequestFailed):
    """The model's logits for this request are NaN or infinite; other requests have their tokens."""


class StepFailed(RequestFailed):
    """The iteration raised an error in the worker: its requests fail, the worker continues."""


class WorkerLost(RequestFailed):
    """A worker process died, and all data on its device is lost."""


class StartupError(EngineError):
    """A setting, the checkpoint or the machine does not allow to start; the message is one line."""


class KernelFaulted(StartupError):
    """A GPU kernel ended all work of its process while it was tried; new workers leave it out."""
