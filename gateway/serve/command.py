"""The command `podway serve`: its flags, made from the settings, and its output.

Exit codes: 0 drained, 1 could not start or lost its workers (`gateway.__main__` prints the line),
130 interrupted.
"""

import argparse
import logging
import sys
import time

from engine.errors import EngineError
from engine.json_log import set_up_json_logs
from engine.transport.process import LocalLauncher
from gateway.serve.assemble import serve
from gateway.serve.load import LoadedModel
from gateway.serve.start_times import StartTimes
from gateway.serve.terminal import LoadingBars, banner, url_of
from gateway.settings.flags import Parser
from gateway.settings.options import Option
from gateway.settings.server import LOCAL_FILE
from gateway.settings.settings import Settings, load, options

REPEATABLE = ("lora",)  # settings whose flag may be given several times
logger = logging.getLogger(__name__)
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def parser() -> Parser:
    """One flag for every setting, in the settings' own groups."""
    parser = Parser(
        "podway serve",
        usage="podway serve [MODEL] [flags]",
        description="Serve a model over the OpenAI API. Default model: builtin.",
        epilog="Precedence: flags, PODWAY_* environment variables, --config FILE, "
        f"{LOCAL_FILE} in the current directory. In files, settings have the flags' names.",
    )
    groups = {}
    for option in options():
        if option.name == "model":
            parser.add_argument("model", nargs="?", metavar=option.metavar, help=_help(option))
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add_flag(groups[option.group], option)
    return parser


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    if option.is_switch:
        action = argparse.BooleanOptionalAction
        group.add_argument(option.flag, action=action, default=None, help=_help(option))
    else:
        metavar = option.metavar or "{" + ",".join(option.choices) + "}"
        how = "append" if option.name in REPEATABLE else "store"
        group.add_argument(option.flag, metavar=metavar, action=how, help=_help(option))


def main(
    argv: list[str], launcher: LocalLauncher | None = None, began_at: float | None = None
) -> int:
    """Serve until a signal. Raises `StartupError`, `Unavailable` if no worker can be restarted,
    and `KeyboardInterrupt` after Ctrl-C. `launcher` starts the workers on this machine;
    the process began at `began_at` on the performance counter."""
    began_at = time.perf_counter() if began_at is None else began_at
    flags = vars(parser().parse_args(argv))
    settings = load({name: value for name, value in flags.items() if value is not None})
    is_json = settings.log_format == "json"
    _set_up_logging(settings)
    with LoadingBars(sys.stderr, logs=is_json) as bars:
        times = StartTimes(bars, began_at, time.perf_counter)

        def announce(port: int, loaded: LoadedModel) -> None:
            bars.stop()
            url = url_of(settings.host, port, "https" if settings.tls_cert else "http")
            cost = f"{loaded.calibration}; lookahead {'on' if loaded.lookahead else 'off'}"
            more = {"sampling": f"defaults {loaded.sampling_defaults}", "cost": cost}
            if settings.lora:
                more["lora"] = ", ".join(value.partition("=")[0] for value in settings.lora)
            if (summary := times.summary()) is not None:
                more["start"] = summary
            sys.stdout.write(banner(url, loaded.name, loaded.report, settings, more))
            sys.stdout.flush()

        try:
            serve(settings, launcher, progress=times, announce=announce)
        except EngineError as error:
            if not is_json:
                raise
            logger.critical("%s", error)
            return 1
    return 0


def _set_up_logging(settings: Settings) -> None:
    level = settings.log_level.upper()
    if settings.log_format == "json":
        set_up_json_logs(level)
    else:
        logging.basicConfig(level=level, format=_LOG_FORMAT, force=True)
    # Its warnings are about requests, each of which has a line in the request log.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


def _help(option: Option) -> str:
    default = f"default {option.default}; " if option.default else ""
    return f"{option.description} ({default}{option.env})"
