from collections.abc import Callable, Mapping
from typing import Any

import pytest

from engine.policy import POLICIES
from examples.benchmarks.cluster import replicas as real_replicas
from examples.benchmarks.cluster import shared_store
from examples.benchmarks.layers import latent_attention, thread_counts
from examples.benchmarks.mtp import acceptance
from examples.benchmarks.peers import images as images_beside_others
from examples.benchmarks.peers import lone_streams, parameters
from examples.benchmarks.real_engine import policies
from examples.benchmarks.server import (
    agent_turns,
    clients,
    decisions,
    held_memory,
    kill_server,
    lora_server,
    models,
    prompt_bounds,
    served_memory,
    start_time,
    upgrades,
)
from examples.benchmarks.server.conformance import page as conformance_page
from examples.benchmarks.virtual_time import (
    learned_cost,
    least_piece,
    mixed_graphs,
    phases_page,
    replicas,
    retention,
    step_cost,
)
from tests.examples.benchmarks.published import RESULTS, read

Page = Callable[[Mapping[str, Any]], str]
PAGES: dict[str, Page] = {
    "images/peers": images_beside_others.page,
    "images/openvino": images_beside_others.page,
    "images/vllm": images_beside_others.page,
    "latent_attention/latent_attention": latent_attention.page,
    "lora/server": lora_server.page,
    "peers/larger_zen5/lone_streams": lone_streams.page,
    "peers/m500_zen5/lone_streams": lone_streams.page,
    "prompt_bounds/prompt_bounds": prompt_bounds.page,
    "speculation/mtp": acceptance.page,
    "replicas/servers": real_replicas.page,
    "disk_tier/shared_store": shared_store.page,
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_that_of_its_run(name: str) -> None:
    found = read(f"{name}.json")
    assert (RESULTS / f"{name}.md").read_text() == PAGES[name](found)


def test_the_page_about_plan_and_commit_is_that_of_its_run() -> None:
    page = (RESULTS / "policies" / "step_cost.md").read_text()
    assert page == step_cost.page(read("policies/step_cost.json"))


def test_the_page_about_upgrades_is_that_of_its_runs() -> None:
    runs = read("upgrades/upgrades.json")
    assert (RESULTS / "upgrades" / "README.md").read_text() == upgrades.page(runs)
    assert not any(run["upgraded"]["lost"] + run["upgraded"]["different"] for run in runs)


def test_the_page_about_agents_turns_is_that_of_its_runs() -> None:
    turns, held = read("agent_turns/agent_turns.json"), read("agent_turns/held_memory.json")
    page = (RESULTS / "agent_turns" / "README.md").read_text()
    assert page == agent_turns.head(turns) + held_memory.section(held)


def test_the_page_about_retries_is_that_of_its_runs() -> None:
    paths = (RESULTS / "retries").glob("*.json")
    runs = {path.stem: read(f"retries/{path.name}") for path in paths}
    assert (RESULTS / "retries" / "README.md").read_text() == kill_server.page(runs)
    assert runs["retries"]["failed"] == 0
    assert not runs["server_kills"]["different"]


FOLDERS: dict[str, Callable[[Any], str]] = {  # file of figures -> the README.md beside it
    **{
        f"{name}/{name}.json": part.page
        for part in (learned_cost, least_piece, mixed_graphs, decisions, parameters, models)
        for name in [part.__name__.rpartition(".")[2]]
    },
    "clients/clients.json": clients.page,
    "conformance/conformance.json": conformance_page.page,
    "phases/phases.json": phases_page.page,
    "real_engine/figures.json": policies.page_of,
    "replicas/replicas.json": replicas.page,
    "retention/retention.json": retention.page,
    "served_memory/figures.json": served_memory.page,
    "start/figures.json": start_time.page,
    "threads/thread_counts.json": thread_counts.page,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_page_of_a_folder_is_that_of_its_run(name: str) -> None:
    page = (RESULTS / name).with_name("README.md").read_text()
    assert page == FOLDERS[name](read(name))


def test_a_run_too_short_for_the_clock_of_cpu_time_has_no_ratio() -> None:
    assert (lora_server.ratio(3, 2), lora_server.ratio(10, 0)) == ("1.50 ×", "—")


def test_drafts_changed_no_token() -> None:
    found = read("speculation/mtp.json")
    assert all(row["same_tokens"] for key in ("acceptance", "speed") for row in found[key])


def test_plan_and_commit_of_256_decodes_take_at_most_a_millisecond() -> None:
    found = read("policies/step_cost.json")
    assert found["output"] == 4000
    assert found["milliseconds"].keys() >= set(POLICIES)
    assert not any(step_cost.above(row) for row in found["milliseconds"].values())


def test_a_shared_store_changed_no_answer() -> None:
    assert all(one["answers"] == 1 for one in read("disk_tier/shared_store.json")["rounds"])
