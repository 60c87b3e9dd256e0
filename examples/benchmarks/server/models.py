"""Several models in one server: its memory beside a server for each, and how soon one is awake.

    python -m examples.benchmarks.server.models MODELS.toml [--wakes 10] [--note "the machine"]
        [--out DIR]

MODELS.toml is a configuration with `[models.NAME]` tables, of which the first is woken; `$NAME` in
it is a variable of this process. Measures the PSS of all processes: with nothing loaded, with each
model loaded after a request, again with everything unloaded, and of a server for each model. A wake
is the time from a request for an unloaded model, whose packed weights are in the page cache, to its
first token. Writes models.json and README.md.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any
from urllib.error import HTTPError

from examples.benchmarks.peers.servers import cpu_seconds, pss_mib
from examples.benchmarks.server.served import serving
from examples.benchmarks.written import write_files

OUT = Path(__file__).parents[1] / "results" / "models"
TABLE = re.compile(r"^\[models\.(\w+)\]\n((?:[^\[\n].*\n|\n)*)", re.M)
WORDS = " ".join(map(str, range(40)))
POLL_SECONDS = 0.02
Figures = dict[str, Any]


def post(url: str, path: str, body: Figures) -> float:
    """The seconds until the first bytes of the answer's body."""
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), head)
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        response.read(1)
        seconds = time.perf_counter() - began
        response.read()
    return seconds


def use(url: str, name: str, prompt: str = WORDS) -> float:
    """A request of a model, which is loaded for it; the seconds to the first token."""
    try:
        body = {"model": name, "prompt": prompt, "max_tokens": 16, "stream": True}
        return post(url, "/v1/completions", body)
    except HTTPError:  # it does not generate text
        return post(url, "/v1/embeddings", {"model": name, "input": WORDS})


def unload(url: str, name: str) -> None:
    """Return when the model is unloaded."""
    post(url, "/models/unload", {"model": name})
    status = ""
    while status != "unloaded":
        time.sleep(POLL_SECONDS)
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            models = json.load(response)["data"]
        (status,) = (each["status"]["value"] for each in models if each["id"] == name)


def together(config: Path, names: list[str], wakes: int) -> Figures:
    """One server of all models."""
    with serving(["--config", str(config), "--store", "memory"]) as (process, url):
        found: Figures = {"nothing loaded yet": round(pss_mib(process), 1)}
        for name in names:
            use(url, name)
            found[f"with {name}"] = round(pss_mib(process), 1)
        for name in names:
            unload(url, name)
        found["everything unloaded"] = round(pss_mib(process), 1)
        woken = []
        for _ in range(wakes):
            used = cpu_seconds(process)
            seconds = use(url, names[0], "Hello")
            used = cpu_seconds(process) - used
            woken.append([round(seconds, 3), round(used, 3), round(os.getloadavg()[0], 1)])
            unload(url, names[0])
        return {"pss_mib": found, "wakes": woken}


def measure(text: str, wakes: int) -> Figures:
    """One server of all models, and one of each after the other."""
    names = [match[1] for match in TABLE.finditer(text)]
    common = text[: text.index("[models.")]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "podway.toml"
        config.write_text(text)
        together(config, names, 0)  # what this packs and compiles is cached
        found = together(config, names, wakes)
        alone = {}
        for match in TABLE.finditer(text):
            config.write_text(re.sub(r"^memory = .*\n", "", common, flags=re.M) + match[0])
            with serving(["--config", str(config), "--store", "memory"]) as (process, url):
                use(url, match[1])
                alone[match[1]] = round(pss_mib(process), 1)
    return found | {"alone_pss_mib": alone}


def page(found: Mapping[str, Any]) -> str:
    """README.md of the results."""
    pss, alone, wakes = found["pss_mib"], found["alone_pss_mib"], sorted(found["wakes"])
    lines = [
        "# Several models in one server",
        "",
        f"`python -m examples.benchmarks.server.models models.toml`; {found['note']}",
        "([JSON](models.json)). PSS of all processes, after a request of each model that is "
        "loaded: *large* has the shape of",
        "Qwen2.5-0.5B, *small* 110 million parameters, both with random weights in int8; "
        "*embedder* is all-MiniLM-L6-v2.",
        "",
        "| | MiB |",
        "|---|---|",
        *[f"| one server, {name} | {size:,.0f} |" for name, size in pss.items()],
        *[f"| a server of {name} alone | {size:,.0f} |" for name, size in alone.items()],
        f"| {len(alone)} servers together | {sum(alone.values()):,.0f} |",
        "",
        "From a request for the first model, which is not loaded, to its first token, with packed "
        f"weights in the page cache: {median(one[0] for one in wakes):.2f} s",
        f"(median of {len(wakes)}; {wakes[0][0]:.2f} to {wakes[-1][0]:.2f} s), "
        f"{median(one[1] for one in wakes):.2f} CPU seconds of the server and its worker, at load "
        f"averages of {min(one[2] for one in wakes)} to {max(one[2] for one in wakes)}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--wakes", type=int, default=10)
    parser.add_argument("--note", default="", help="the machine, and what else ran on it")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    text = os.path.expandvars(args.config.read_text())
    found = {"note": args.note, **measure(text, args.wakes)}
    write_files(args.out, {"models.json": found, "README.md": page(found)})
    sys.stdout.write(page(found))


if __name__ == "__main__":
    main()
