"""Several servers under the same loads, alternating: medians, memory, start-up.

    python -m examples.benchmarks.peers SERVERS.toml [--rounds 3] [--only NAME ...] [--out DIR]

SERVERS.toml names the servers and the loads; those of the published tables are in
examples/benchmarks/results/peers. Each round starts every server once, waits for its first token,
runs all loads and stops it. Writes figures.json, and README.md with the tables, beside
SERVERS.toml.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.benchmarks.peers.loads import Load, read_loads
from examples.benchmarks.peers.servers import Server, read_servers, running
from examples.benchmarks.peers.tables import page


def measure(server: Server, loads: list[Load], scratch: Path) -> dict[str, object]:
    """One server's figures of one round; a load that fails is recorded as its error's last line."""
    with running(server) as up:
        found: dict[str, object] = {
            "server": server.name,
            "group": server.group,
            "first_token_seconds": up.first_token_seconds,
            "pss_mib_at_start": up.pss_mib(),
        }
        found["loads"] = {load.name: load.run(up, scratch) for load in loads}
        return found | {"pss_mib_after": up.pss_mib()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("servers", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, metavar="DIR")
    args = parser.parse_args()
    tables = tomllib.loads(args.servers.read_text())
    servers = [one for one in read_servers(tables) if not args.only or one.name in args.only]
    out: Path = args.out or args.servers.parent
    out.mkdir(parents=True, exist_ok=True)
    figures = out / "figures.json"
    rounds: list[dict[str, object]] = []
    with TemporaryDirectory() as scratch:
        loads = read_loads(tables, Path(scratch))
        for number in range(args.rounds):
            for server in servers:
                print(f"round {number + 1}: {server.name}", file=sys.stderr, flush=True)
                rounds.append({"round": number} | measure(server, loads, Path(scratch)))
                figures.write_text(json.dumps(rounds, indent=1) + "\n")
    text = page(args.servers, rounds, loads)
    (out / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
