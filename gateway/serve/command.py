"""The command `podway serve`: its flags, made from the settings, and what it checks first.

Exit codes: 0 drained, 1 could not start or lost its workers (`gateway.__main__` prints the line),
130 interrupted.
"""

import argparse
import importlib
import logging
import time
from collections.abc import Callable
from typing import cast

from engine.errors import EngineError
from engine.json_log import set_up_json_logs
from engine.transport.process import LocalLauncher
from gateway.options import Option
from gateway.serve.model_checks import check_local_model
from gateway.serve.upgrade import systemd
from gateway.serve.upgrade.inherited import Inherited
from gateway.serve.upgrade.waiter import become_waiter
from gateway.settings.checks import check_device, check_models, check_settings
from gateway.settings.flags import CommandLineError, Parser
from gateway.settings.server import LOCAL_FILE
from gateway.settings.settings import Settings, load, options

VLLM_FLAGS = {
    "--model": "the argument MODEL",
    "--quantization": "--weights",
    "-q": "--weights",
    "--max-num-seqs": "--max-batch-size",
    "--max-num-batched-tokens": "--max-batch-tokens",
    "--num-gpu-blocks-override": "--kv-slots",
    "--swap-space": "--host-kv-memory",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--enable-prefix-caching": "--prefix-cache",
    "--scheduling-policy": "--policy",
    "--tensor-parallel-size": "--tensor-ranks",
    "-tp": "--tensor-ranks",
    "--pipeline-parallel-size": "--pipeline-stages",
    "-pp": "--pipeline-stages",
    "--distributed-executor-backend": "--launcher",
    "--attention-backend": "--attention",
    "--enforce-eager": "--no-cuda-graphs",
    "--enable-auto-tool-choice": "--tool-dialect",
    "--tool-call-parser": "--tool-dialect",
    "--reasoning-parser": "--reasoning-dialect",
    "--load-format": "the model random:SHAPE",
    "--allowed-origins": "--cors-origin",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--disable-log-requests": "--log-level",
    "--uvicorn-log-level": "--log-level",
    "--lora-modules": "--lora",
    "--max-cpu-loras": "--max-loras",
    "--data-parallel-size": "--replicas",
    "-dp": "--replicas",
}


logger = logging.getLogger(__name__)
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def parser(*, shows_all: bool = True) -> Parser:
    """One flag for every setting, in the settings' own groups. The help has all flags, or only
    those that most people need."""
    parser = Parser(
        "podway serve",
        VLLM_FLAGS,
        usage="podway serve [MODEL ...] [flags]",
        description="Serve models over the OpenAI API. Default model: builtin.",
        epilog="--help-all shows all flags. Precedence: flags, PODWAY_* environment variables, "
        f"--config FILE, {LOCAL_FILE} in the current directory. In files, settings have the flags' "
        "names.",
    )
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all flags and exit")
    groups = {}
    for option in options():
        text = _help(option) if shows_all or not option.declared.is_advanced else argparse.SUPPRESS
        if option.name == "model":
            parser.add_argument("model", nargs="*", metavar=option.metavar, help=text)
            continue
        group = option.declared.group
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        _add_flag(groups[group], option, text)
    return parser


class _HelpAll(argparse.Action):
    """Shows the flags that `--help` leaves out as well."""

    def __call__(self, *_: object) -> None:
        whole = parser()
        whole.print_help()
        whole.exit()


def _add_flag(group: argparse._ArgumentGroup, option: Option, text: str) -> None:
    if option.is_switch:
        action = argparse.BooleanOptionalAction
        group.add_argument(option.flag, action=action, default=None, help=text)
    else:
        how = "append" if option.has_several else "store"
        group.add_argument(option.flag, metavar=option.metavar, action=how, help=text)


def main(
    argv: list[str],
    launcher: LocalLauncher | None = None,
    began_at: float | None = None,
    inherited: Inherited | None = None,
) -> int:
    """Serve until a signal. Raises `StartupError`, `Unavailable` if no worker can be restarted,
    and `KeyboardInterrupt` after Ctrl-C. `launcher` starts the workers on this machine;
    the process began at `began_at` on the performance counter. With `inherited` it succeeds another
    server, which is told why it cannot."""
    began_at = time.perf_counter() if began_at is None else began_at
    try:
        return _run(argv, launcher, began_at, inherited)
    except (EngineError, CommandLineError) as error:
        if inherited is not None:
            inherited.report(error.text if isinstance(error, CommandLineError) else str(error))
        if isinstance(error, LoggedError):
            return 1
        raise


class LoggedError(EngineError):
    """An error that ends the command, and is in the log in its own format."""


def _run(
    argv: list[str],
    launcher: LocalLauncher | None,
    began_at: float,
    inherited: Inherited | None,
) -> int:
    flags = vars(parser(shows_all=False).parse_args(argv))
    settings = load({name: value for name, value in flags.items() if value is not None})
    _set_up_logging(settings)
    try:
        check_models(settings)
        for each in settings.deployments:
            check_settings(each)
            check_device(each)
            check_local_model(each)
        has_successor = _serve()(settings, launcher, began_at, inherited)
    except EngineError as error:
        if settings.observe.log_format != "json":
            raise
        logger.critical("%s", error)
        raise LoggedError(str(error)) from error
    if has_successor and inherited is None and not systemd.is_notified():
        become_waiter()
    return 0


Serve = Callable[[Settings, LocalLauncher | None, float, Inherited | None], bool]


def _serve() -> Serve:
    """The server, whose imports take half a second: what is wrong is said before them."""
    function = importlib.import_module("gateway.serve.announced").serve_announced
    return cast("Serve", function)


def _set_up_logging(settings: Settings) -> None:
    level = settings.observe.log_level.upper()
    if settings.observe.log_format == "json":
        set_up_json_logs(level)
    else:
        logging.basicConfig(level=level, format=_LOG_FORMAT, force=True)
    # Its warnings are about requests, each of which has a line in the request log.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


def _help(option: Option) -> str:
    default = f"default {option.default_text}; " if option.default_text else ""
    return f"{option.declared.help} ({default}{option.env})"
