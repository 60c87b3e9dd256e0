"""The page of `fleet`, from what its `fleet.json` has."""

from collections.abc import Mapping
from typing import Any

Found = Mapping[str, Any]
HOUR = 3600.0


def report(found: Found, check: Found | None = None) -> str:
    """The page, with the parts that were run; `check` has the figures of `fleet_check`."""
    parts = [_HEAD]
    parts += [largest(found[name]) for name in found if name.startswith("largest_")]
    for name in ("azure", "mooncake"):
        if name in found:
            parts.append(routers(name, found[name]))
        if f"{name}_plan" in found:
            parts.append(plan(name, found[f"{name}_plan"]))
    if "outages" in found:
        parts.append(outages(found["outages"]))
    if check is not None:
        parts.append(beside_servers(check))
    return "\n".join(parts)


def largest(part: Found) -> str:
    """A paragraph on the largest fleet under one trace."""
    (row,) = part["rows"]
    text = (
        f"The largest: {part['replicas']:,} replicas and {part['requests']:,} requests of "
        f"{part['seconds']:,.0f} s, {part['title']}. {speed(part, row)}"
    )
    for again in part["repeated"]:
        used = again["speed"]
        text += (
            f" Run again in {again['processes']} process(es), in {used['cpu']:,.0f} CPU seconds "
            f"({used['wall']:,.0f} s): the same digest of all figures, {again['digest']}."
        )
    return text + "\n"


def outages(part: Found) -> str:
    """A paragraph on a fleet whose machines die and are upgraded."""
    (row,), pauses = part["rows"], part["pauses"]
    ttft, jct = row["spreads"]["ttft"], row["spreads"]["jct"]
    ended = part["upgraded_at"]
    upgrade = "had not ended then" if ended is None else f"ended at {ended:,.0f} s"
    text = (
        f"{part['title']}: {part['replicas']:,} replicas on {part['machines']:,} machines, "
        f"{part['requests']:,} requests of {part['seconds']:,.0f} s behind *forecast*, whose "
        f"placement is that of `--replicas`. {part['deaths']} machines die, each for a minute; "
        "their requests go on elsewhere after the next load report, with the tokens that they "
        f"have. From {part['upgrade_at']:,.0f} s on the machines are upgraded, {part['at_once']} "
        "at a time: they get no new requests, finish those they have, load for a minute and begin "
        f"with empty caches.\n\n{row['num_finished']:,} requests ended, and "
        f"{row['num_arrived'] - row['num_finished']} were lost. {part['moved']:,} went on "
        f"elsewhere, after a pause of {pauses['p50']:.2f} s (p50), {pauses['p99']:.2f} s (p99), at "
        f"most {pauses['highest']:.2f} s. The upgrade {upgrade}; at least "
        f"{part['least_active']:,} replicas took requests at any time. TTFT {ttft['p50']:.3g} s "
        f"(p50) and {ttft['p99']:.3g} s (p99), JCT {jct['p50']:.3g} s and {jct['p99']:.3g} s. "
        f"{speed(part, row)}"
    )
    if part["seconds"] < HOUR:
        minutes = row["speed"]["cpu"] * HOUR / part["seconds"] / 60
        text += f" The whole hour was not played: at this speed it takes {minutes:.0f} CPU minutes."
    return f"## Deaths and a rolling upgrade\n\n{text}\n"


def beside_servers(check: Found) -> str:
    """A table of what two real servers did and what the simulation says."""
    loads = [row["load_average"] for row in check["rows"]]
    lines = [
        "## Two real servers behind smg, and the simulation",
        "",
        "`python -m examples.benchmarks.cluster.fleet_check --smg PATH`: the same chats at the",
        "same times at two servers of the built-in model behind smg 1.13, and at two simulated",
        "replicas behind *smg-cache-aware* or *round-robin*. Each replica has the cost that one of",
        "the servers recorded while both servers, smg and the clients shared 2 cores, at a",
        f"load average of up to {max(loads):.0f}. smg chooses among equal workers at random:",
        "simulated values are means of 20 seeds. JCT is for information: the servers' includes",
        "HTTP, tokenizing and smg.",
        "",
        "| smg's policy | requests/s | | measured | simulated | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in check["rows"]:
        for name, unit in _CHECKED.items():
            real, ours = row["measured"][name], row["simulated"][name]
            error = f"{ours / real - 1.0:+.0%}"
            cells = (
                f"{row['policy']} | {row['rate']:g} | {unit} | {real:.3g} | {ours:.3g} | {error}"
            )
            lines.append(f"| {cells} |")
    return "\n".join([*lines, ""])


_CHECKED = {
    "share": "share of the busier replica",
    "cached": "share of prompt tokens cached",
    "throughput": "requests/s done",
    "mean JCT": "mean JCT, s",
}
_HEAD = """# Fleets in virtual time

Regenerate with `python -m examples.benchmarks.virtual_time.fleet --traces DIR`. Replicas of the
server's scheduler, each with its own KV cache, behind a router; steps take what a roofline model of
the device predicts. Replicas report their load every 100 ms, and the router decides by the last
reports and by what it has sent since. Every figure but the speed is a function of the trace; two
runs, on any number of processes, are equal bit for bit. No such fleet was ever run for real.

- *round-robin*: each replica in turn. *least-tokens*: fewest tokens of live requests.
- *prefix*: the replica that got the longest matching prefix, unless it is overloaded.
- *smg-cache-aware*: the cache_aware policy of smg 1.13, from its source: much like *prefix*, but by
  reports that are up to 10 s old, and prompts without a known length.
- *forecast*: each replica forecasts by the engine's cost model how much later a new request would
  end; the router adds the uncached part of the prompt and its delay of the live requests.
"""
HEADER = (
    "| router | TTFT p50 s | p99 s | ITL p99 ms | JCT p50 s | p99 s | cached | busy, p5 to p95 |"
)


def routers(name: str, part: Found) -> str:
    """A table with a row per router, and the speed."""
    lines = [
        f"## {part['title']}",
        "",
        f"![latencies by router, and the fleet over time]({name}.png)",
        "",
        f"{part['replicas']:,} replicas, {part['requests']:,} requests, {part['seconds']:,.0f} s.",
        "",
        HEADER,
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in part["rows"]:
        spreads = row["spreads"]
        cells = (
            row["router"],
            f"{spreads['ttft']['p50']:.3g}",
            f"{spreads['ttft']['p99']:.3g}",
            f"{1e3 * spreads['itl']['p99']:,.0f}",
            f"{spreads['jct']['p50']:.3g}",
            f"{spreads['jct']['p99']:.3g}",
            f"{row['cached_share']:.1%}",
            f"{row['busy_p5']:.0%} to {row['busy_p95']:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(speed(part, row) for row in part["rows"][-1:]), ""]
    return "\n".join(lines)


def speed(part: Found, row: Found) -> str:
    """A sentence on the time of a run."""
    cpu, wall = row["speed"]["cpu"], row["speed"]["wall"]
    return (
        f"Speed, {row['router']}: {row['num_iterations']:,} iterations and "
        f"{row['output_tokens']:,} tokens in {cpu:,.0f} CPU seconds ({wall:,.0f} s) in "
        f"{part['processes']} processes on an {part['processor']}, load average "
        f"{row['load_average']:.1f}; {1e6 * cpu / part['requests']:,.0f} µs for a request."
    )


def plan(name: str, part: Found) -> str:
    """A table of the fewest GPUs."""
    goals = part["goals"].replace(",", ", ").replace("=", " ≤ ")
    lines = [
        f"### GPUs that it needs: {goals} s",
        "",
        f"![latencies over GPUs, and the goals]({name}_plan.png)",
        "",
        f"{part['requests']:,} requests in {part['seconds']:,.0f} s; searched as by `podway plan`.",
        "",
        "| router | GPUs |",
        "|---|---|",
    ]
    lines += [f"| {router} | {row['gpus']} |" for router, row in part["routers"].items()]
    return "\n".join([*lines, ""])
