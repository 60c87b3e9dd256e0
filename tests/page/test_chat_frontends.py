"""Chat frontends of other projects over a real server, in Chromium: gradio and deep-chat.

Screenshots go to the folder in `PODWAY_TEST_SCREENSHOTS`, if it is set.
"""

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.clients.test_other_environment import PYTHON
from tests.conftest import read_url, start_server
from tests.page.conftest import AXE

DEEP_CHAT = AXE.parents[1] / "deep-chat" / "dist" / "deepChat.bundle.js"
QUESTION, ANSWER = "What is 2 + 3?", "5"
PAGE = """<!doctype html><title>deep-chat</title><link rel="icon" href="data:,">
<deep-chat id="chat"></deep-chat><script type="module">
  import "./deepChat.bundle.js";
  const chat = document.getElementById("chat");
  chat.connect = {url: "URL/v1/chat/completions", stream: true};
  chat.directConnection = {openAI: {key: "any", completions: true}};
</script>"""


def keep(page: Page, name: str) -> None:
    if folder := os.environ.get("PODWAY_TEST_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


@pytest.fixture
def page(context: BrowserContext) -> Page:
    """A page that reaches this machine only; the frontends would load fonts from elsewhere."""
    page = context.new_page()
    remote = re.compile(r"^(?!https?://(127\.0\.0\.1|localhost)[:/]|data:|blob:)")
    page.route(remote, lambda route: route.abort())
    return page


@pytest.fixture
def gradio_url(page_url: str) -> Iterator[str]:
    """A gradio app whose model is behind the server."""
    if not PYTHON.with_name("gradio").exists():
        pytest.skip("gradio is not installed: make clients")
    command: list[Path | str] = [PYTHON, Path(__file__).with_name("gradio_frontend.py"), page_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip()
        finally:
            child.kill()


def test_gradio_streams_an_answer(page: Page, gradio_url: str) -> None:
    page.goto(gradio_url)
    page.get_by_test_id("textbox").fill(QUESTION)
    page.get_by_test_id("textbox").press("Enter")
    expect(page.get_by_test_id("bot")).to_contain_text(ANSWER)
    expect(page.get_by_test_id("user")).to_contain_text(QUESTION)
    keep(page, "gradio")


@pytest.fixture
def deep_chat_url(tmp_path: Path) -> Iterator[str]:
    """A page with deep-chat on another origin than the server, which has the name of the model that
    deep-chat requests by default as an alias."""
    if not DEEP_CHAT.exists():
        pytest.skip("needs deep-chat (npm install --prefix examples)")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        origin = f"http://127.0.0.1:{files.server_address[1]}"
        flags = ["--cors-origin", origin, "--served-model-name", "builtin,gpt-4o"]
        with start_server(tmp_path, *flags) as child:
            (tmp_path / "index.html").write_text(PAGE.replace("URL", read_url(child)))
            (tmp_path / DEEP_CHAT.name).write_bytes(DEEP_CHAT.read_bytes())
            threading.Thread(target=files.serve_forever, daemon=True).start()
            yield origin
            files.shutdown()


def test_deep_chat_streams_an_answer_from_another_origin(page: Page, deep_chat_url: str) -> None:
    page.goto(deep_chat_url)
    page.locator("#text-input").fill(QUESTION)
    page.locator("#text-input").press("Enter")
    expect(page.locator(".ai-message-text")).to_contain_text(ANSWER)
    keep(page, "deep_chat")
