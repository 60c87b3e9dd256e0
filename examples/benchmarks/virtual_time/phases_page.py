"""README.md of the comparison of prefill and decode apart with equal replicas."""

from collections.abc import Mapping, Sequence
from typing import Any

GOALS = (0.025, 0.05)  # seconds between two tokens
CPU_GOALS = (0.05, 0.1)
CPU = ", one core each"  # ends the name of a trace on replicas of the CPU
POISSON = ", Poisson"  # in the name of a trace whose requests arrive without bursts
SHARE = 0.9  # of the requests

NAMES = {"mean": "mean gap", "all": "all gaps"}

Rows = Sequence[Mapping[str, Any]]


def measures(row: Mapping[str, Any]) -> list[str]:
    """The goals: for the mean of a request's gaps between tokens, or for all of them."""
    return [name for name in row if name.partition(" ")[0] in NAMES]


def rate_of(rows: Rows, measure: str) -> float:
    """The highest rate below the first one at which too few requests meet the goals; 0 if that is
    the lowest one."""
    best = 0.0
    for row in sorted(rows, key=lambda row: float(row["rate"])):
        if row[measure] < SHARE:
            break
        best = float(row["rate"])
    return best


def sustained(rows: Rows) -> list[dict[str, Any]]:
    """For each trace, number of replicas and goal the best equal and the best split replicas."""
    table: list[dict[str, Any]] = []
    for trace, count in sorted({(row["trace"], row["replicas"]) for row in rows}):
        own = [row for row in rows if (row["trace"], row["replicas"]) == (trace, count)]
        seconds = round(own[0]["requests"] / own[0]["rate"] / count)
        for measure in measures(own[0]):
            best: dict[bool, tuple[float, str]] = {True: (0.0, "—"), False: (0.0, "—")}
            for way in dict.fromkeys(row["way"] for row in own):
                of_way = [row for row in own if row["way"] == way]
                rate = rate_of(of_way, measure)
                if rate > best[of_way[0]["is_apart"]][0]:
                    best[of_way[0]["is_apart"]] = rate, way
            table.append(
                {"trace": trace, "replicas": count, "measure": measure, "seconds": seconds}
                | {"equal": best[False], "apart": best[True]}
            )
    return table


def table_of(rows: Rows) -> list[str]:
    lines = [
        "| trace | seconds | replicas | goal | equal: requests/s each | apart: requests/s each "
        "| apart / equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sustained(rows):
        (equal, way), (apart, split) = row["equal"], row["apart"]
        kind, goal = row["measure"].split()
        ratio = f"{apart / equal:.2f}" if equal else "—"
        lines.append(
            f"| {row['trace']} | {row['seconds']} | {row['replicas']} | {NAMES[kind]} ≤ {goal} ms "
            f"| {equal:g} ({way}) "
            f"| {apart:g} ({split}) | {ratio} |"
        )
    return lines


def summary(rows: Rows) -> str:
    """In how many rows each side sustains more."""
    rates = [(row["equal"][0], row["apart"][0]) for row in sustained(rows)]
    ahead = sum(apart > equal for equal, apart in rates)
    behind = sum(apart < equal for equal, apart in rates)
    return (
        f"Of {len(rates)} rows, replicas with phases apart sustain a higher rate in {ahead}, and "
        f"equal replicas in {behind}."
    )


def page(rows: Rows) -> str:
    """README.md of the results."""
    gpus = [row for row in rows if not row["trace"].endswith(CPU)]
    lines = [
        "# Prefill and decode apart, against equal replicas",
        "",
        "`python -m examples.benchmarks.virtual_time.phases`: Llama-3.1-70B, four H100 per "
        "replica, in virtual time. The highest",
        "rate of requests per replica, of those played, at which 90 % of all requests have their "
        "first token within 1 s plus twice",
        "the time that their prompt takes alone, and gaps between tokens within the goal: their "
        "mean, or all of them. Both sides",
        "have the same hardware; of each the best setting is shown: equal replicas with chunks of "
        "512 or 2,048 tokens, or with an",
        "ITL goal; apart, the best split. KV goes through host memory, at 70 % of 64 GB/s per GPU. "
        "All shares: [JSON](phases.json).",
        "",
        summary(gpus),
        "Where even the lowest rate played is too high the table says 0. Most requests that miss a "
        "goal apart miss that of the first",
        "token: under code and Mooncake's trace requests arrive in bursts (ten at the same "
        "moment), which fewer replicas take; under",
        "conversations the one replica for prompts of two is about fully used at the rate where it "
        "fails (an estimate).",
        "Code at 0.6 requests/s each on two replicas: 225 of 360 first tokens are late apart, and "
        "11 with an ITL goal of 50 ms; one",
        "and two queues, first come first served, have 222 and 8. The gap before a second token "
        "apart has the copies of the last",
        "chunk, the rest of an iteration in flight and the loads of others, so that goals of 25 ms "
        "for all gaps are missed; equal",
        "replicas with an ITL goal meet them. On 16 replicas 0.15 is the highest rate of "
        "Mooncake's trace that was played.",
        "",
        "Without bursts (Poisson: the same requests with exponential gaps) both sides sustain "
        "several times the rate of code. At 5",
        "requests/s each on eight replicas six for prompts are fully used and first tokens are "
        "late; with seven the one that decodes",
        "misses a mean gap of 25 ms. Equal replicas use all eight for both. So the server's "
        "replicas have no roles.",
        "",
        "On 32 replicas 1.5 is the highest rate that was played on both sides.",
        "With more replicas fewer seconds are played, for their CPU time, and not all splits: on "
        "32, and on 8 without bursts,",
        "those with three quarters and seven eighths of the replicas for prompts; up to 16 with "
        "the trace's bursts at most three",
        "quarters. Not played: 64 replicas, conversations and Mooncake's trace on 32, other models "
        "and other goals for the first token,",
        "under which this may be different.",
        "",
        *table_of(gpus),
        "",
        "On a CPU: random weights of M110 in float32, two replicas of one core of an AMD EPYC (Zen "
        "3), with the cost that a server of one",
        "thread has measured ([JSON](cpu_cost.json)); KV is copied through shared memory at 4.5 "
        "GB/s. Played in virtual time, too, since",
        "the server has no roles:",
        "",
        *table_of([row for row in rows if row["trace"].endswith(CPU)]),
        "",
    ]
    return "\n".join(lines)
