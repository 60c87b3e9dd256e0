import json
import re
from pathlib import Path

from PIL import Image

from tests.conftest import read_url, start_server
from tests.examples.running import EXAMPLES, run_script

MAX_LINES = 90


def test_each_script_is_listed_and_short() -> None:
    page = (EXAMPLES / "gallery" / "README.md").read_text()
    scripts = sorted((EXAMPLES / "gallery").glob("*.py"))
    assert len(scripts) == 10
    for script in scripts:
        assert f"`{script.name}`" in page
        assert len(script.read_text().splitlines()) <= MAX_LINES


def test_an_agent_looks_at_the_project_first(server_url: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1 + 1)")
    arguments = (tmp_path, "Which files are there?", "--url", server_url)
    shown = run_script("gallery/coding_agent.py", *arguments).splitlines()
    assert shown[0].split()[0] in ("list_files", "read_file", "write_file", "run")
    cached, total = map(int, re.findall(r"\d+", shown[-1]))
    assert 0 < cached < total


def test_documents_are_embedded_ranked_and_quoted(tmp_path: Path) -> None:
    with start_server(tmp_path, "--config", str(EXAMPLES / "gallery" / "models.toml")) as server:
        shown = run_script("gallery/answer_from_documents.py", read_url(server)).splitlines()
    assert sum(line.startswith("  from: ") for line in shown) == 3


def test_all_texts_of_a_batch_have_a_label(server_url: str) -> None:
    shown = run_script("gallery/classify_batch.py", server_url, "--count", "12")
    assert shown.startswith("12 texts in ")


def test_an_order_is_extracted_as_its_schema_says(server_url: str) -> None:
    order = json.loads(run_script("gallery/extract.py", server_url))
    assert order["urgency"] in ("today", "this week", "later")
    assert 1 <= len(order["items"]) <= 5


def test_each_question_about_a_ticket_has_probabilities(server_url: str) -> None:
    shown = run_script("gallery/route_ticket.py", server_url).splitlines()
    names = [line.split(":")[0] for line in shown]
    assert names == ["is_angry", "is_dangerous", "team", "urgency", "tokens"]


def test_a_document_is_computed_once(server_url: str, tmp_path: Path) -> None:
    document = tmp_path / "document"
    document.write_text("Podway serves requests with an engine of its own. " * 40)
    shown = run_script("gallery/long_document.py", server_url, document).splitlines()
    cached = [int(line.split()[-5]) for line in shown]
    assert len(cached) == 4
    assert min(cached[1:]) > 300


def test_a_lost_stream_goes_on_where_it_was(server_url: str) -> None:
    first, _, rest = run_script("gallery/lost_connection.py", server_url).partition("\n-- lost ")
    assert first
    assert len(rest.partition(" --\n")[2]) > len(first)


def test_the_flood_of_one_key_is_measured_under_both_policies(tmp_path: Path) -> None:
    keys = ("--admin-api-key", "admin", "--api-key", "flood,person")
    with start_server(tmp_path, "--max-batch-size", "16", *keys) as server:
        shown = run_script("gallery/agent_fleet.py", read_url(server)).splitlines()
    assert [line.split(":")[0] for line in shown] == ["fcfs", "fair"]


def test_a_sleeping_server_leaves_the_memory_and_wakes(tmp_path: Path) -> None:
    shown = run_script("gallery/sleeping_server.py", "builtin", "1").splitlines()
    awake, asleep = ([int(line.split()[-2]) for line in shown[at::2]] for at in (0, 1))
    assert len(asleep) == 2
    assert max(asleep) < min(awake)


def test_an_image_is_not_encoded_again_for_the_next_question(tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    Image.new("RGB", (64, 64), (200, 10, 10)).save(path)
    with start_server(tmp_path, "random:SmolVLM2-256M") as server:
        shown = run_script("gallery/describe_image.py", path, read_url(server)).splitlines()
    cached = [int(line.split()[0]) for line in shown if line.endswith("tokens cached")]
    assert cached[0] == 0
    assert cached[1] > 1000
