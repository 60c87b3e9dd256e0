"""`podway help [TOPIC]`: the manual in the terminal, a section of the documentation at a time."""

import re
import sys
from collections import defaultdict

from rich.console import Console
from rich.markdown import Markdown

from engine.errors import StartupError
from gateway.console import ROOT
from gateway.settings.flags import Parser, did_you_mean

PAGES = (
    "gateway/OPERATIONS.md",
    "gateway/README.md",
    "gateway/PROTECTION.md",
    "engine/README.md",
    "adapters/models/README.md",
)


def parser() -> Parser:
    """The arguments of `podway help`."""
    parser = Parser("podway help", description="Show a section of the manual.")
    parser.add_argument("topic", nargs="?", help="a section; without one they are listed")
    return parser


def main(argv: list[str]) -> int:
    """Raises `StartupError` for an unknown topic."""
    topic = parser().parse_args(argv).topic
    sections = topics()
    if topic is None:
        sys.stdout.write("podway help TOPIC shows one of:\n")
        sys.stdout.writelines(f"  {name}\n" for name in sections)
        return 0
    if topic not in sections:
        hint = did_you_mean(topic, sections)
        raise StartupError(f"no topic {topic!r}{hint} (podway help lists all topics)")
    console = Console()
    if console.is_terminal:
        with console.pager(styles=True):
            console.print(Markdown(sections[topic]))
    else:
        sys.stdout.write(sections[topic])
    return 0


def topics() -> dict[str, str]:
    """The Markdown of each section under its heading in lower case, words joined by hyphens.

    Sections of several pages under one heading are one topic.
    """
    texts: dict[str, str] = defaultdict(str)
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
            heading = section.partition("\n")[0]
            texts["-".join(re.findall(r"[a-z0-9]+", heading.lower()))] += f"## {section}"
    return texts
