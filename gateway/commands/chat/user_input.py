"""The user's messages: typed or pasted at a terminal, or lines of a pipe.

A terminal in bracketed-paste mode marks pasted text, and GNU readline then keeps its newlines in
the line. Text between two lines of three double quotes is one message on every terminal.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

QUOTES = '"""'
MAX_HISTORY = 1000  # messages in the history file


def typed_messages() -> Iterator[str]:
    """Messages typed at the prompt. Ctrl-C clears the line, Ctrl-D ends the session."""
    with line_editing():
        while True:
            try:
                text = quoted(input("> "), lambda: input("… "))
            except KeyboardInterrupt:
                sys.stdout.write("\n(/exit or Ctrl-D to leave)\n")
            except EOFError:
                sys.stdout.write("\n")
                return
            else:
                if text:
                    yield text


def piped_messages(stream: Iterable[str]) -> Iterator[str]:
    """The lines of a pipe that are not empty; quoted lines are one message."""
    lines = iter(stream)
    for line in lines:
        if text := quoted(line, lambda: next(lines, QUOTES)):
            yield text


def quoted(line: str, next_line: Callable[[], str]) -> str:
    """The message that begins with `line`, stripped; reads on if the line is three quotes."""
    if line.strip() != QUOTES:
        return line.strip()
    lines = []
    while (line := next_line().rstrip("\n")).strip() != QUOTES:
        lines.append(line)
    return "\n".join(lines).strip()


@contextmanager
def line_editing() -> Iterator[None]:
    """Line editing, multi-line paste, and a history that is kept between sessions."""
    import readline  # changes how input() behaves, so it is imported only for a terminal

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited, from nohup for instance
        signal.signal(signal.SIGINT, signal.default_int_handler)
    readline.parse_and_bind("set enable-bracketed-paste on")
    path = history_file()
    with suppress(OSError):  # there is no history yet, or it cannot be read
        readline.read_history_file(path)
    readline.set_history_length(MAX_HISTORY)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)  # messages are private
        except OSError as error:
            sys.stderr.write(f"cannot save the history to {path}: {error.strerror}\n")


def history_file() -> Path:
    """`podway/chat_history` in the user's state directory."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "podway" / "chat_history"
