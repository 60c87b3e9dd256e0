"""`podway completion SHELL`: a script with which bash, zsh or fish completes commands and flags."""

import argparse
import importlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.commands.table import COMMANDS
from gateway.settings.flags import Parser


class FlagInfo(NamedTuple):
    """A flag, its help, and the values that it allows (empty: any)."""

    flag: str
    help: str
    values: tuple[str, ...]


def parser() -> Parser:
    """The arguments of `podway completion`."""
    parser = Parser(
        "podway completion",
        description="Print a completion script. "
        'bash: eval "$(podway completion bash)" in ~/.bashrc; '
        'zsh: eval "$(podway completion zsh)" in ~/.zshrc, after compinit; '
        "fish: podway completion fish > ~/.config/fish/completions/podway.fish",
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell")
    return parser


def main(argv: list[str]) -> int:
    shell = parser().parse_args(argv).shell
    sys.stdout.write(SCRIPTS[shell](all_flags()))
    return 0


def all_flags() -> dict[str, list[FlagInfo]]:
    """The flags of every command."""
    return {name: _flags_of(target.partition(":")[0]) for name, (target, _) in COMMANDS.items()}


def _flags_of(module: str) -> list[FlagInfo]:
    built: argparse.ArgumentParser = importlib.import_module(module).parser()
    return [
        FlagInfo(flag, action.help or "", tuple(map(str, action.choices or ())))
        for action in built._actions
        for flag in action.option_strings
        if flag.startswith("--")
    ]


def bash(flags: Mapping[str, Sequence[FlagInfo]]) -> str:
    """A function for bash's programmable completion, `complete -F`."""
    cases = []
    for command, infos in flags.items():
        for info in infos:
            if info.values:
                words = shlex.quote(" ".join(info.values))
                cases.append(f"    {command}:{info.flag}) words={words} ;;")
        words = shlex.quote(" ".join(info.flag for info in infos))
        cases.append(f'    {command}:*) [[ "$word" == -* ]] && words={words} ;;')
    commands = shlex.quote(" ".join(flags))
    body = "\n".join(cases)
    return f"""_podway() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {commands} -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}:$before" in
{body}
  esac
  [ -n "$words" ] && COMPREPLY=($(compgen -W "$words" -- "$word")) || COMPREPLY=()
}}
complete -o default -F _podway podway
"""


def zsh(flags: Mapping[str, Sequence[FlagInfo]]) -> str:
    """The bash script, run by zsh's emulation of bash completion."""
    return "autoload -U +X bashcompinit && bashcompinit\n" + bash(flags)


def fish(flags: Mapping[str, Sequence[FlagInfo]]) -> str:
    """One `complete` line for each command and flag."""
    lines = [
        f"complete -c podway -n __fish_use_subcommand -f -a {command} -d {_fish(text)}"
        for command, (_, text) in COMMANDS.items()
    ]
    for command, infos in flags.items():
        seen = f"complete -c podway -n '__fish_seen_subcommand_from {command}'"
        for info in infos:
            values = f" -x -a {_fish(' '.join(info.values))}" if info.values else ""
            lines.append(f"{seen} -l {info.flag[2:]} -d {_fish(info.help)}{values}")
    return "\n".join(lines) + "\n"


def _fish(text: str) -> str:
    text = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
