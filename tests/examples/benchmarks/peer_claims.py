"""What pages state about other servers, each claim written from its JSON."""

from collections.abc import Sequence
from statistics import median

from tests.examples.benchmarks.published import read


def peers(shape: str, server: str, load: str, key: str = "output_rate") -> float:
    """The median of the rounds."""
    runs = [run for run in read(f"peers/{shape}/figures.json") if run["server"] == server]
    if key in runs[0]:
        return median(float(run[key]) for run in runs)
    return median(float(run["loads"][load][key]) for run in runs if load in run["loads"])


FORMATS = {  # row of README.md: Podway's server and the group of servers
    "float32": ("Podway float32", "M500, float32"),
    "bfloat16": ("Podway bfloat16", "M500, bfloat16"),
    "int8": ("Podway int8", "M500, 8 bits"),
    "Q4_0": ("Podway Q4_0 file", "M500, 4 bits"),
}
COLUMNS = (  # the key of a load or of a run, and whether more is better
    ("C=8", "output_rate", True),
    ("C=32", "output_rate", True),
    ("C=1", "ttft_p50", False),
    ("", "pss_mib_after", False),
    ("", "first_token_seconds", False),
)
LARGER = (
    ("128 in", "itl_p50", False),
    ("C=4", "output_rate", True),
    ("C=16", "output_rate", True),
    ("128 in", "ttft_p50", False),
    ("4,096 in", "ttft_p50", False),
    ("", "pss_mib_after", False),
)


def number(value: float, key: str, load: str) -> str:
    if key == "itl_p50":
        value = 1 / value  # of a lone stream: tokens/s after the first one
    elif key == "ttft_p50" and load == "C=1":
        return f"{value * 1e3:,.0f}"  # ms
    return f"{value:.1f}" if value < 99 else f"{value:,.0f}"


def cells(shape: str, ours: str, group: str, columns: Sequence[tuple[str, str, bool]]) -> str:
    """Podway and the best of the others, with its first letter, for each column; the better in
    bold."""
    runs, found = read(f"peers/{shape}/figures.json"), []
    others = {run["server"] for run in runs if run["group"] == group} - {ours}
    others = {name for name in others if not name.startswith("Podway")}
    for load, key, more in columns:
        values = [(peers(shape, server, load, key), server[0].upper()) for server in others]
        best, letter = max(values) if more else min(values)
        own = peers(shape, ours, load, key)
        mine, theirs = number(own, key, load), number(best, key, load)
        is_better = own > best if more else own < best
        found.append(
            f"**{mine}** : {theirs} {letter}" if is_better else f"{mine} : **{theirs}** {letter}"
        )
    return " | ".join(found)


def alone(shape: str, ours: str, group: str) -> tuple[float, str]:
    """Tokens per second of a lone stream, as a multiple of the best other server's, which is named
    by its first letter: medians of answers in turn."""
    rows = read(f"peers/{shape}/lone_streams.json")["rows"]
    seconds = {row["server"]: row["tokens"] for row in rows if row["group"] == group}
    return min(
        (
            median(theirs / own for own, theirs in zip(seconds[ours], times, strict=True)),
            name[0].upper(),
        )
        for name, times in seconds.items()
        if not name.startswith("Podway")
    )


def in_turn(shape: str, group: str) -> str:
    """Tokens per second of Podway's and another server's lone streams, answers in turn."""
    rows = read(f"peers/{shape}/lone_streams.json")["rows"]
    (own, mine), (other, theirs) = (
        (1 / median(row["tokens"]), row["server"]) for row in rows if row["group"] == group
    )
    assert own > other
    assert mine.startswith("Podway")
    return f"**{own:.1f}** : {other:.1f} {theirs[0].upper()}"


def beside_others() -> list[str]:
    """A row of README.md for each model and format. Not all lone streams in bfloat16 had memory of
    the same speed: answers in turn stand for them."""
    groups = dict.fromkeys(run["group"] for run in read("peers/larger_zen5/figures.json"))
    rows = []
    for group in groups:
        lone, _, others = cells("larger_zen5", f"Podway {group}", group, LARGER).partition(" | ")
        if group == "Qwen3-4B, bf16":
            lone = in_turn("larger_zen5", "Qwen3-4B, bfloat16")
        rows.append(f"| {group} | {lone} | {others} |")
    for title, (ours, group) in FORMATS.items():
        times, letter = alone("m500_zen5", ours, group)
        mine = f"**{times:.2f}** : 1 {letter}" if times > 1 else f"{times:.2f} : **1** {letter}"
        rows.append(f"| {title} | {mine} | {cells('m500_zen5', ours, group, COLUMNS)} |")
    return rows


def ratio(ours: str, theirs: str) -> float:
    return peers("m500_zen5", ours, "C=32") / peers("m500_zen5", theirs, "C=32")


def beside_peers() -> list[str]:
    pairs = {
        "float32": ("Podway float32", "OpenVINO f32"),
        "bfloat16": ("Podway bfloat16", "vLLM zentorch bfloat16"),
        "int8": ("Podway int8", "vLLM zentorch W8A8 bfloat16"),
        "Q4_0": ("Podway Q4_0 file", "llama-server q4_0"),
    }
    one, two, three, four = (f"{ratio(*pair):.2f}" for pair in pairs.values())
    a, b, c, d = (f"{alone('m500_zen5', *pair)[0]:.2f}" for pair in FORMATS.values())
    return [
        f"{one} (float32), {two} (bfloat16), {three} (int8) and {four} times (Q4_0)",
        f"{a} (float32), {b} (bfloat16), {c} (int8) and {d} times",
    ]


def with_recurrent_layers() -> list[str]:
    today = [peers("hybrid_avx2", "Podway q8_0, today", f"C={streams}") for streams in (1, 8, 32)]
    claims = []
    for other in ("Podway q8_0, before", "llama-server q8_0"):
        rates = [peers("hybrid_avx2", other, f"C={streams}") for streams in (1, 8, 32)]
        one, two, three = (f"{own / rate:.1f}" for own, rate in zip(today, rates, strict=True))
        claims.append(f"{one}, {two} and {three} times")
    before, beside = claims
    return [
        f"today {before} the tokens/s of 1, 8 and 32 streams before",
        f"and {beside} llama-server's",
    ]
