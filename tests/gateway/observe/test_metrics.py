import asyncio
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import Abort
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from engine.step import Direction
from gateway.observe.metric_table import METRICS
from gateway.observe.metrics import Histogram, Metrics, StepMetrics
from tests.engine.control.served_loop import ONE_SECOND, read
from tests.gateway.rig import CHAT, STEP, TEXT, Rig, Setting, chat, play, played, text
from tests.scheduling import a_spec


def test_a_histogram_counts_into_cumulative_buckets() -> None:
    histogram = Histogram((1, 2, 4))
    for value, times in ((0.5, 1), (1, 1), (3, 2), (9, 1)):
        histogram.add(value, times)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 2), ("4.0", 4), ("+Inf", 5)]
    assert histogram.sum == 16.5


@played(Setting(texts=("abcdefgh",)))
async def test_gaps_are_counted_once_per_token_in_any_batch(rig: Rig) -> None:
    await rig.client.post(CHAT, chat(n=3, max_tokens=4))
    metrics = rig.metrics
    assert metrics.inter_token.buckets()[-1] == ("+Inf", 3 * 3)
    assert metrics.inter_token.sum == 9 * STEP
    assert metrics.time_to_first_token.sum == (1 + 2 + 2) * STEP  # two reuse the first's prompt
    assert metrics.num_output_tokens == 12
    assert metrics.requests.finishes["length"] == 3
    assert metrics.requests.max_generation_tokens.buckets()[-1] == (
        "+Inf",
        1,
    )  # one request, 3 choices
    assert metrics.requests.max_generation_tokens.sum == 4


@played()
async def test_aborts_are_counted_by_reason(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat()):
        await asyncio.sleep(1.5 * STEP)
    await rig.client.post(CHAT, chat(stop="l"))
    await asyncio.sleep(2 * STEP)
    metrics = rig.metrics
    assert metrics.requests.aborts[Abort.CLIENT_GONE] == 1
    assert metrics.requests.aborts[Abort.STOP_STRING] == 1
    assert metrics.requests.outcomes["finished"] == 1
    assert metrics.requests.outcomes["cancelled"] == 1
    assert metrics.requests.finishes["stop"] == 1


def test_what_is_swapped_is_counted_by_kind_direction_tier_and_state() -> None:
    pages: list[str] = []

    async def scene(rig: Rig) -> None:
        async def ask() -> None:
            await rig.client.post(TEXT, text(max_tokens=12))

        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(ask())
            for _ in range(20):
                await asyncio.sleep(STEP)
                pages.append((await rig.service.exposition.render()).decode())

    texts = ("abcdefghijklmno",)
    setting = Setting(texts, num_blocks=16, num_host_blocks=100, prefix_cache=False)
    metrics = play(scene, setting).metrics
    assert metrics.requests.preemptions == {"recompute": 0, "reactive": 1, "proactive": 0}
    assert metrics.requests.swapped_blocks == {Direction.OUT: 8, Direction.IN: 8}
    assert any('podway_kv_slots{state="moving",tier="host"} 8.0' in page for page in pages)
    assert any('podway_kv_slots{state="held",tier="host"} 8.0' in page for page in pages)
    assert any("podway_requests_swapped 1.0" in page for page in pages)
    assert 'podway_kv_slots{state="free",tier="host"} 100.0' in pages[-1]
    assert 'podway_swapped_blocks_total{direction="out"} 8.0' in pages[-1]
    assert 'podway_preemptions_total{kind="reactive"} 1.0' in pages[-1]


def test_steps_with_an_itl_goal_and_the_cost_models_error_are_shown() -> None:
    pages: list[str] = []

    async def scene(rig: Rig) -> None:
        await rig.client.post(CHAT, chat(n=2, max_tokens=6))
        pages.append((await rig.client.get("/metrics")).content.decode())

    assert play(scene, Setting(texts=("abcdefgh",), itl_goal=STEP / 2)).metrics.goal_steps == {
        "met": 0,
        "exceeded": 6,
    }
    assert play(scene, Setting(texts=("abcdefgh",), itl_goal=2 * STEP)).metrics.goal_steps == {
        "met": 6,
        "exceeded": 0,
    }
    tight, wide = pages
    assert f"podway_itl_goal_seconds {STEP / 2}" in tight
    assert 'podway_itl_goal_steps_total{result="met"} 6.0' in wide
    assert 'podway_cost_model_error{percentile="90"}' in wide
    assert "podway_itl_goal_seconds 0.0" in play_and_read()


def play_and_read() -> str:
    """`/metrics` of a server without a goal."""
    pages: list[str] = []

    async def scene(rig: Rig) -> None:
        pages.append((await rig.client.get("/metrics")).content.decode())

    play(scene)
    return pages[0]


UNITS = ("_ms", "_milliseconds", "_minutes", "_kib", "_kilobytes", "_percent")  # not base units
TYPES = ("counter", "gauge", "histogram", "summary")


def test_our_metrics_keep_the_rules_of_prometheus() -> None:
    """Those of `promtool check metrics`: names, suffixes, units, help and reserved labels."""
    families = {each.name: each for each in text_string_to_metric_families(play_and_read())}
    own = [row for row in METRICS if not row.name.startswith("vllm:")]
    assert own
    for row in own:
        name = row.name
        assert row.help, name
        assert name == name.lower(), name
        assert ":" not in name, name
        assert name.endswith("_total") is (row.kind.name == "COUNTER"), name
        assert not name.endswith(("_bucket", "_sum", "_count", *UNITS)), name
        assert not set(name.split("_")) & set(TYPES), name
        assert not {"quantile", "le", "job", "instance"} & set(row.labels), name
        assert families[name.removesuffix("_total")].type == row.kind.name.lower()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_promtool_finds_nothing_wrong_with_our_metrics() -> None:
    own = [line for line in play_and_read().splitlines() if "vllm:" not in line]
    page = "\n".join([*own, ""])
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_each_metric_is_one_row_of_the_table() -> None:
    names = [name for row in METRICS for name in (row.name, row.alias) if name]
    assert len(names) == len(set(names))


@played(Setting(keys=("alice=k1", "bob=k2", "eve=k3"), admin_keys=("root=a",)))
async def test_a_key_sees_its_own_requests_and_an_admin_key_those_of_every_key(rig: Rig) -> None:
    for key in ("k1", "k2"):
        await rig.client.post(CHAT, chat(), {"x-api-key": key})
    seen = {}
    for key in ("k1", "k3", "a"):
        page = (await rig.client.get("/metrics", {"x-api-key": key})).content.decode()
        lines = [line for line in page.splitlines() if line.startswith("podway_key_requests")]
        seen[key] = {line.partition('key="')[2].partition('"')[0] for line in lines}
        assert "podway_requests_total" in page
    assert seen == {"k1": {"alice"}, "k3": set(), "a": {"alice", "bob", "eve"}}


@played()
async def test_readers_share_one_page_per_tick_that_is_never_older_than_their_question(
    rig: Rig,
) -> None:
    async def read() -> bytes:
        return (await rig.client.get("/metrics")).content

    first = await read()
    await rig.client.get("/nowhere")
    pages = await asyncio.gather(*(read() for _ in range(20)))
    assert b'path="other"' not in first
    assert b'path="other"' in pages[0]
    assert set(pages) == {pages[0]}


def test_gaps_are_as_long_where_iterations_are_planned_ahead() -> None:
    async def main() -> Metrics:
        metrics = Metrics()
        scheduler = IterationScheduler(
            SchedulerSettings(max_model_len=500, max_batch_size=4, max_batch_tokens=8),
            KVLedger(KVShape(99, 1)),
            FirstComeFirstServed(),
            observer=StepMetrics(metrics),
        )
        executor = SimulatedExecutor(ONE_SECOND, lookahead=1)
        engine = Engine(scheduler, executor, asyncio.get_running_loop().time, lookahead=1)
        running = asyncio.create_task(engine.run())
        with engine.stream(a_spec(2, 6)) as stream:
            assert len(await read(stream)) == 6
        running.cancel()
        return metrics

    metrics = run_virtual(main())
    assert metrics.inter_token.buckets()[-1] == ("+Inf", 5)
    assert metrics.inter_token.sum == 5.0
    assert metrics.num_output_tokens == 6
    assert metrics.time_to_first_token.buckets()[-1] == ("+Inf", 1)
