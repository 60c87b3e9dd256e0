"""What pages state about scheduling, each claim written from its JSON."""

from statistics import fmean
from typing import Any

from examples.benchmarks.real_engine import accuracy_page
from examples.benchmarks.virtual_time import fleet_page
from examples.benchmarks.virtual_time.policy_tables import groups, ratios
from tests.examples.benchmarks.published import RESULTS, brief, plain, read


def iteration_level() -> list[str]:
    points = read("iteration_against_request.json")
    (top, per_token), slowest = points["grow"][-1], points["request"][0]
    assert slowest[1] >= per_token > points["grow"][0][1]  # both at the same latency, or better
    both = f"{per_token * 1e3:.0f} ms per token"
    return [
        f"serves {top:.1f} requests/s at {both}; request-level serves {slowest[0]:.1f} requests/s"
    ]


def iteration_level_table() -> list[str]:
    points = read("iteration_against_request.json")
    rows = [
        f"| {title} level, ms per token | " + " | ".join(f"{1e3 * at:.1f}" for _, at in points[key])
        for title, key in (("iteration", "grow"), ("request", "request"))
    ]
    (top, per_token), slowest = points["grow"][-1], points["request"][0]
    sentence = (
        f"At {1e3 * per_token:.0f} ms per token iteration-level scheduling serves {top:.1f} "
        f"requests/s and request-level scheduling {slowest[0]:.1f}"
    )
    return [*rows, sentence]


def orca() -> list[str]:
    (fitted,) = (rows for name, rows in read("orca/orca.json").items() if name != "slowdown 1.000")
    rates = {name: row["requests_per_second"] for name, row in fitted.items()}
    best = max(rate for name, rate in rates.items() if name.startswith("iteration"))
    rival = max(rate for name, rate in rates.items() if name.startswith("request"))
    single = rates["request level (1, 1)"]
    return [
        f"{best / single:.1f} × request-level scheduling of single requests",
        f"and {best / rival:.1f} × the best request-level setting",
        "(the paper: 36.9 ×)",
    ]


def jct(run: dict[str, Any], point: str) -> float:
    return float(run["spreads"]["jct"][point])


def fastserve() -> list[str]:
    found = read("fastserve/fastserve.json")
    rows = found["skewed lengths"]
    loads = [rows[at : at + 4] for at in range(0, len(rows), 4)]

    def best(point: str) -> float:
        return max(jct(runs[0], point) / jct(run, point) for runs in loads for run in runs[1:3])

    def worth(kind: str) -> float:
        runs = found["swapping, skewed lengths"]
        return max(
            jct(runs[f"{load}/s, {kind}"], "mean") / jct(runs[f"{load}/s, proactive"], "mean")
            for load in (8, 12, 16)
        )

    azure = found["Azure conversations"]
    assert all(jct(azure[at], "mean") <= jct(azure[at + 2], "mean") for at in (3, 6))
    edge = {name: jct(run, "mean") for name, run in found["where it stops"].items()}
    by_admission = [edge[f"64 seats, 16/s, {name}"] for name in ("FCFS (Orca)", "FCFS, grow")]
    return [
        f"mean JCT is up to {best('mean'):.1f} × and its median JCT up to {best('p50'):.0f} ×",
        f"its p99 is longer at every load ({best('p99'):.2f} × at best)",
        f"up to {worth('no preemption'):.1f} × better than no preemption",
        f"{worth('reactive'):.1f} × better than reactive swapping",
        f"FCFS takes {by_admission[0]:.2f} s when it reserves KV for whole answers",
        f"{by_admission[1]:.2f} s when it allocates KV as needed",
        f"MLFQ takes {edge['64 seats, 16/s, MLFQ, 30 s']:.2f} s",
    ]


def policies() -> list[str]:
    found = read("real_engine/figures.json")
    fcfs, mlfq = found["skewed"]["fcfs 1.8"], found["skewed"]["mlfq 1.8"]
    chat = found["mlfq"]
    assert fmean(chat["fcfs 1.8"]["jct"]) < fmean(chat["mlfq 1.8"]["jct"])
    tenants = [fmean(found["fair"][f"{name} small, four"]["ttft"]) for name in ("fcfs", "fair")]
    in_time = [found["deadline"][f"{name} 1.5"]["in_time"][0] for name in ("fcfs", "deadline")]
    prefix = found["prefix"]
    share = prefix["32,768 slots"]["hit_rate"] / prefix["best_hit_rate"]
    ttft = [fmean(prefix[name]["ttft"]) for name in ("no reuse", "32,768 slots")]
    return [
        f"mean JCT is {fmean(mlfq['jct']) / fmean(fcfs['jct']):.2f} of FCFS's",
        f"its goodput {mlfq['goodput'] / fcfs['goodput']:.1f} times",
        f"from {tenants[0]:.2f} s to {tenants[1]:.2f} s",
        f"from {in_time[0]:.0%} to {in_time[1]:.0%}".replace("%", " %"),
        f"finds {100 * share:.0f} % of what an unbounded cache",
        f"from {brief(ttft[0])} s to {brief(ttft[1])} s",
    ]


def policies_in_virtual_time() -> list[str]:
    found: dict[tuple[str, str, str], list[float]] = {}
    for case, _, system, own, base in groups(read("policies/policies.json")):
        for latency in ("mean", "p99"):
            each = fmean(ratios(own, base, latency))
            found.setdefault((case, system, latency), []).append(each)

    def spans(system: str, latency: str) -> str:
        titles = {"Azure code": "code", "skewed lengths": "skewed lengths"}
        titles["Azure conversations"] = "conversations"
        each = {title: found[case, system, latency] for case, title in titles.items()}
        return ", ".join(f"{min(v):.2f} to {max(v):.2f} × on {name}" for name, v in each.items())

    return [f"`mlfq`: mean {spans('mlfq', 'mean')}; p99 {spans('mlfq', 'p99')}."]


def itl_goal() -> list[str]:
    rows = read("itl_goal/virtual.json")["rows"]

    def best(limit: float, is_goal: str) -> float:
        return max(
            float(row["goodput"])
            for row in rows
            if row["is_goal"] == is_goal and row["itl_p99_ms"] <= limit
        )

    return [
        f"p99 of 15 ms, `--itl-goal` has a goodput of {best(15, 'True'):.3g} requests/s",
        f"budget {best(15, 'False'):.3g}; within 20 ms both have {best(20, 'True'):.3g}",
        f"both have {best(20, 'False'):.3g}",
    ]


def fleet() -> list[str]:
    """The whole page, as the command writes it."""
    found = [read(f"fleet/{name}.json") for name in ("fleet", "fleet_check")]
    return [plain(fleet_page.report(*found))]


def accuracy() -> list[str]:
    """The whole page, as the command writes it."""
    earlier = accuracy_page.earlier(RESULTS / "accuracy")
    return [plain(accuracy_page.report(read("accuracy/figures.json"), earlier))]
