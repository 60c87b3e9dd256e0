"""What servers do with each parameter of the official clients: three requests to each server.

    python -m examples.benchmarks.peers.parameters NAME=URL … [--model m] [--about TEXT] [--out DIR]

A request with the parameter is compared with one without it; a third one has a value of a wrong
type. Nothing random is in the requests: the temperature is 0, and the seed is given.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from examples.benchmarks.written import write_results
from tests.gateway.web.parameters import APIS, FRESH, IGNORED_HEADER, Api, without

HONOURED, REJECTED, NAMED, CHECKED, IGNORED, ABSENT = (
    "honoured", "rejected", "named as ignored", "checked", "ignored", "no endpoint",
)  # fmt: skip
ABOUT = {
    HONOURED: "the response is another one, if only because it repeats the parameter",
    REJECTED: "an error",
    NAMED: "the response is the same, and a header says that the parameter is ignored",
    CHECKED: "the response is the same, and a value of a wrong type is an error",
    IGNORED: "the response is the same, also with a value of a wrong type: a typing error, or a "
    "parameter that the server does not know, goes unnoticed",
    ABSENT: "the server has no such endpoint, or refuses the plain request",
}
FIXED = {"temperature": 0, "seed": 1}
TIMES = ("timings", "system_fingerprint", "prompt_ms", "predicted_ms")
WRONG = ({"wrong": ["type"]}, 7)  # the second where an object is right


async def answer(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]
) -> tuple[int, Any, str]:
    """Status, what the response says, and the header of ignored fields."""
    async with session.post(url, json=body) as response:
        text = await response.text()
        ignored = response.headers.get(IGNORED_HEADER, "")
        if response.content_type != "application/json":
            return response.status, fields_of(text), ignored
        return response.status, without(await response.json(), (*FRESH, *TIMES)), ignored


def fields_of(stream: str) -> set[str]:
    """The fields with values of a stream's chunks, whose number depends on the time."""
    chunks = (line[6:] for line in stream.splitlines() if line.startswith("data: {"))
    return {name for chunk in chunks for name, value in json.loads(chunk).items() if value}


async def verdict(
    session: aiohttp.ClientSession, url: str, api: Api, name: str, fixed: Mapping[str, Any]
) -> str:
    """What the server does with a parameter."""
    probe, field = api.probes[name], name.partition(".")[0]
    body = {**fixed, **api.body, **probe.others}
    plain = await answer(session, url, body)
    if plain[0] != 200:
        return ABSENT
    asked = {**body, field: probe.value}
    if field == "max_completion_tokens":
        del asked["max_tokens"]
    found = await answer(session, url, asked)
    if found[0] != 200:
        return REJECTED
    if found[1] != plain[1] and found[1] != (await answer(session, url, body))[1]:
        return HONOURED  # a warm cache can give another answer than a cold one
    if field in found[2]:
        return NAMED
    wrong = WRONG[isinstance(probe.value, dict)]
    status, *_ = await answer(session, url, {**asked, field: wrong})
    return IGNORED if status == 200 else CHECKED


async def measure(urls: Mapping[str, str], model: str) -> list[dict[str, Any]]:
    """A row for each parameter, with the verdict of each server."""
    rows = []
    timeout, own = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=own) as session:
        for api in APIS:
            for name in api.probes:
                fixed = {"model": model, "max_tokens": 8, **FIXED}
                if api.path == "/v1/responses":
                    fixed["max_output_tokens"] = fixed.pop("max_tokens")
                if api.path == "/v1/messages":
                    del fixed["seed"]
                row = {"api": api.title, "parameter": name}
                for server, url in urls.items():
                    row[server] = await verdict(session, url + api.path, api, name, fixed)
                print(*row.values(), flush=True)
                rows.append(row)
    return rows


def page(found: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown; the first row says what was measured."""
    about, *rows = found
    servers = [name for name in rows[0] if name not in ("api", "parameter")]
    counts = [
        f"| {kind} | " + " | ".join(str(sum(r[s] == kind for r in rows)) for s in servers) + " |"
        for kind in ABOUT
    ]
    lines = [
        "# What servers do with each parameter",
        "",
        "`python -m examples.benchmarks.peers.parameters`: each parameter of the official clients,",
        "sent once in a right and once in a wrong type ([JSON](parameters.json)).",
        f"{about['about']}.",
        "",
        *(f"- *{kind}*: {text}." for kind, text in ABOUT.items()),
        "",
        "A parameter that changes nothing in one answer of a few tokens, such as `top_p` at",
        "temperature 0, counts as checked or ignored, and so do tools that random weights never",
        "call and a chat template does not show; Podway's",
        "[own list](../../../../gateway/PARAMETERS.md) looks at what the engine gets.",
        "OpenVINO Model Server was not asked: of it PyPI has only a client (`ovmsclient` 2023.1).",
        "",
        f"| | {' | '.join(servers)} |",
        f"|---|{'--:|' * len(servers)}",
        *counts,
        "",
        f"| API | parameter | {' | '.join(servers)} |",
        f"|---|---|{'---|' * len(servers)}",
        *(
            f"| {row['api']} | `{row['parameter']}` | {' | '.join(row[s] for s in servers)} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--model", default="m", help="the name of the model on all servers")
    parser.add_argument("--about", default="", help="versions and model, for the page")
    parser.add_argument("--out", type=Path, help="directory of the results")
    options = parser.parse_args()
    urls = dict(each.split("=", 1) for each in options.servers)
    rows = asyncio.run(measure(urls, options.model))
    if options.out:
        write_results(options.out, [{"about": options.about}, *rows], page)


if __name__ == "__main__":
    main()
