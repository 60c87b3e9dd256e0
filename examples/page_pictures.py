"""The pictures of the web page: a chat, and the engine while 170 requests are generated.

podway serve --policy mlfq --max-batch-size 14 --kv-slots 2048 --host-kv-memory 3MiB
python examples/page_pictures.py [FOLDER] [URL]

It writes `chat_view.png` and `engine_view.png` into the folder. It needs Chromium and Playwright.
"""

import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, expect, sync_playwright

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
URL = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
NUM_REQUESTS = 170
CHATS = (
    ("What is the capital of Norway?", "And of Italy?"),
    ("Write a short poem about the sea.",),
    ("Name three fruits.", "What is 12 + 30?", "What is a KV cache?"),
)


def ask(page: Page, question: str) -> None:
    answers = page.locator(".message.assistant").count()
    page.get_by_label("Message", exact=True).fill(question)
    page.locator("#send").click()
    expect(page.locator(".message.assistant")).to_have_count(answers + 1)
    expect(page.locator("#send")).to_be_visible()


def picture_of_a_chat(browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1100, "height": 760})
    page.goto(URL)
    for questions in CHATS:
        page.get_by_role("link", name="New chat").click()
        expect(page.locator(".welcome")).to_be_visible()
        for question in questions:
            ask(page, question)
    page.get_by_role("button", name="Why slow?").last.click()
    expect(page.locator(".why")).to_be_visible()
    page.locator(".messages").evaluate("(list) => list.scrollTo(0, list.scrollHeight)")
    page.screenshot(path=FOLDER / "chat_view.png")


def generate(number: int) -> int:
    """The status of a request of random length."""
    lengths = random.Random(number)
    body = {
        "model": "builtin",
        "prompt": "All work and no play. " * lengths.randrange(1, 20),
        "max_tokens": lengths.randrange(40, 400),
        "ignore_eos": True,
    }
    headers = {"x-request-id": f"load-{number}"}
    return httpx.post(f"{URL}/v1/completions", json=body, headers=headers, timeout=600).status_code


def picture_of_the_engine(browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1100, "height": 1700})
    page.goto(f"{URL}/#engine")
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        statuses = threads.map(generate, range(NUM_REQUESTS))
        expect(page.locator("td", has_text="it is on the host").first).to_be_visible()
        page.screenshot(path=FOLDER / "engine_view.png")
        print(sorted(set(statuses)))


with sync_playwright() as playwright:
    expect.set_options(timeout=120_000)
    chromium = playwright.chromium.launch(
        executable_path=shutil.which("chromium"), args=["--no-sandbox"]
    )
    picture_of_a_chat(chromium)
    picture_of_the_engine(chromium)
    chromium.close()
