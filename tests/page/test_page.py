import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from engine.simulated.figures import Distribution
from tests.conftest import read_url, start_server
from tests.models.mmproj_files import CHAT, Mmproj
from tests.page.conftest import AXE

MARKDOWN = Path(__file__).parent / "all_of_markdown.md"
RECORDING = Path(__file__).parents[1] / "replays" / "fcfs_grow.jsonl"
START_A_STORY = """void fetch("/v1/completions", {
    method: "POST",
    headers: {"content-type": "application/json"},
    body: JSON.stringify({model: "builtin", prompt: "x", max_tokens: 9000, ignore_eos: true}),
})"""
VIEWS = ("chat", "engine", "request", "replay")


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.locator("#send").click()


def await_text(page: Page) -> None:
    """Wait until an answer has begun; until then its body shows an ellipsis."""
    expect(page.locator(".message.assistant .body > :not(.soft)").first).to_be_attached()


def answers(page: Page) -> int:
    return page.locator(".message.assistant .figures", has_text="tokens/s").count()


SEED = """async (fields) => {
    const { empty } = await import("/page/chat/conversation.js");
    const { save, saveNow } = await import("/page/chat/database.js");
    const conversation = {...empty(), ...fields};
    save(conversation);
    await saveNow();
    location.hash = `chat/${conversation.id}`;
}"""


def seed_chat(page: Page, url: str, **settings: int) -> None:
    """Open a new conversation with these settings, some of which have no field."""
    page.goto(f"{url}/")
    page.evaluate(SEED, {"settings": settings})
    expect(page.locator(".entry a[aria-current]")).to_be_visible()


def test_a_chat_streams_and_shows_its_figures(page: Page, page_url: str) -> None:
    page.goto(f"{page_url}/")
    ask(page, "Hello!")
    figures = page.locator(".message.assistant .figures")
    expect(figures).to_contain_text("tokens/s")
    expect(figures).to_contain_text("first token")
    assert page.locator(".message.assistant .body").inner_text().strip()
    page.reload()
    expect(page.locator(".message.user")).to_contain_text("Hello!")  # history is in the browser


def busy(page_url: str) -> AbstractContextManager[httpx.Response]:
    """Other streams, so that an answer takes long enough to be stopped on any machine."""
    body = {"model": "builtin", "prompt": "a", "max_tokens": 16000, "ignore_eos": True, "n": 12}
    return httpx.stream("POST", f"{page_url}/v1/completions", json=body | {"stream": True})


def test_an_answer_of_another_tab_is_waited_for_or_stopped(
    context: BrowserContext, page: Page, page_url: str
) -> None:
    seed_chat(page, page_url, min_tokens=16000, max_tokens=16050)
    other = context.new_page()
    other.goto(page.url)
    expect(other.locator(".entry a[aria-current]")).to_be_visible()
    with busy(page_url):
        ask(page, "Tell me a story.")
        await_text(other)
        other.get_by_label("Message", exact=True).fill("And then?")
        other.get_by_label("Message", exact=True).press("Enter")
        expect(other.locator(".message")).to_have_count(2)
        other.get_by_role("button", name="Stop").click()
    for tab in (page, other):
        expect(tab.locator(".figures")).to_contain_text("stopped")
        expect(tab.locator("#send")).to_be_visible()
        expect(tab.get_by_role("alert")).to_have_count(0)


PASTE = """async ([place, how]) => {
    const canvas = Object.assign(document.createElement("canvas"), {width: 3000, height: 30});
    canvas.getContext("2d").fillRect(0, 0, 9, 9);
    const blob = await new Promise((done) => canvas.toBlob(done));
    const transfer = new DataTransfer();
    transfer.items.add(new File([blob], "a.png", {type: "image/png"}));
    const data = {clipboardData: transfer, dataTransfer: transfer};
    const options = {bubbles: true, cancelable: true, ...data};
    const event = how === "paste" ? new ClipboardEvent(how, options) : new DragEvent(how, options);
    document.querySelector(place).dispatchEvent(event);
}"""


def test_images_are_pasted_dropped_removed_and_sent(context: BrowserContext, page_url: str) -> None:
    page = context.new_page()  # which may log that the model refuses the image
    page.goto(f"{page_url}/")
    page.locator(".composer textarea").wait_for()
    page.evaluate(PASTE, [".composer textarea", "paste"])
    page.evaluate(PASTE, [".composer", "drop"])
    expect(page.locator(".composer img")).to_have_count(2)
    page.get_by_role("button", name="Remove image 1").click()
    expect(page.locator(".composer img")).to_have_count(1)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is this?")
    body = sent.value.post_data_json
    assert body is not None
    image, text = body["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/webp;base64,")
    assert text == {"type": "text", "text": "What is this?"}
    expect(page.locator(".message.user img")).to_be_visible()
    assert page.locator(".message.user img").evaluate("image => image.naturalWidth") == 1280
    expect(page.get_by_role("alert")).to_contain_text("this model reads text only")
    expect(page.locator(".composer img")).to_have_count(0)
    page.reload()
    expect(page.locator(".message.user img")).to_be_visible()


def test_a_model_that_reads_images_answers_about_one(page: Page, tmp_path: Path) -> None:
    model, one_tile = tmp_path / "tiny.gguf", {"clip.vision.preproc_image_size": 20}
    Mmproj("smolvlm", text=CHAT, more=one_tile).write(model, tmp_path / "mmproj-tiny.gguf")
    with start_server(tmp_path, str(model), "--store", "memory") as server:
        page.goto(f"{read_url(server)}/")
        page.locator(".composer textarea").wait_for()
        page.evaluate(PASTE, [".composer textarea", "paste"])
        expect(page.locator(".composer img")).to_have_count(1)
        with page.expect_response("**/v1/chat/completions") as answered:
            ask(page, "what is this.")
        figures = page.locator(".message.assistant .figures")
        expect(figures).to_contain_text("prompt 43")  # of these, 28 for the image
    assert answered.value.status == 200


def test_editing_and_regenerating_add_branches(page: Page, page_url: str) -> None:
    page.goto(f"{page_url}/")
    ask(page, "What is 2 + 3?")
    expect(page.locator(".figures")).to_contain_text("tokens/s")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".branch")).to_have_text("2 / 2")
    page.get_by_role("button", name="Previous branch").click()
    expect(page.locator(".branch")).to_have_text("1 / 2")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("What is 4 + 4?")
    page.get_by_role("button", name="Send edit").click()
    expect(page.locator(".message.user .body")).to_have_text("What is 4 + 4?")
    expect(page.locator(".message.user .branch")).to_have_text("2 / 2")


def test_the_stop_button_frees_the_slots(page: Page, page_url: str) -> None:
    seed_chat(page, page_url, min_tokens=16000, max_tokens=16050)
    with busy(page_url):
        ask(page, "Tell me a story.")
        await_text(page)
        page.locator("#stop").click()
        expect(page.locator(".figures")).to_contain_text("stopped")
    page.get_by_role("link", name="Engine").click()
    expect(page.locator(".kv-held").first).to_have_text("0")
    expect(page.locator("[data-figure=running]")).to_have_text("0")


def test_a_wrong_key_is_reported_and_a_right_one_opens_the_page(
    browser: Browser, guarded_url: str
) -> None:
    page = browser.new_page()  # the browser itself logs the 401s
    page.goto(f"{guarded_url}/")
    page.get_by_role("textbox", name="API key").fill("wrong")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("alert")).to_contain_text("API key")
    page.get_by_role("textbox", name="API key").fill("secret")
    page.get_by_role("button", name="Continue").click()
    ask(page, "Hello!")
    expect(page.locator(".figures")).to_contain_text("tokens/s")
    assert page.evaluate("localStorage.getItem('podway-key')") is None
    page.close()


def test_two_hundred_requests_are_seen_in_the_engine_view(page: Page, page_url: str) -> None:
    def generate(number: int) -> int:
        body = {"model": "builtin", "prompt": f"{number}", "max_tokens": 1000, "ignore_eos": True}
        return httpx.post(f"{page_url}/v1/completions", json=body, timeout=120).status_code

    page.goto(f"{page_url}/#engine")
    expect(page.locator(".tiles")).to_be_visible()
    with ThreadPoolExecutor(200) as threads:
        statuses = threads.map(generate, range(200))
        expect(page.locator("td", has_text="a seat").first).to_be_visible()
        expect(page.locator("tbody tr").nth(16)).to_be_visible()
        expect(page.locator("[data-figure=running]")).to_have_text("16")
        assert set(statuses) == {200}
    expect(page.locator("[data-figure=running]")).to_have_text("0")


def test_an_answer_links_to_its_timeline(page: Page, page_url: str) -> None:
    page.goto(f"{page_url}/")
    ask(page, "Hello!")
    page.get_by_role("link", name="timeline").click()
    expect(page.locator(".explanation")).to_contain_text("It did not wait")
    expect(page.locator("tbody")).to_contain_text("decode")


def replay(page: Page) -> None:
    """Open the recording, and simulate it under another policy."""
    page.get_by_label("Recording").set_input_files(RECORDING)
    expect(page.get_by_role("heading", name="Recorded")).to_be_visible()
    page.get_by_label("Position").fill("0.5")
    page.get_by_label("Other policy").select_option("mlfq")
    page.get_by_role("button", name="Simulate").click()
    expect(page.get_by_role("heading", name="Under mlfq")).to_be_visible()


def test_a_recording_is_shown_and_simulated_under_another_policy(page: Page, page_url: str) -> None:
    page.goto(f"{page_url}/#replay")
    replay(page)
    expect(page.locator("table")).to_contain_text("mean JCT s")
    shown = dict(
        page.locator("table tr").evaluate_all(
            "(rows) => rows.map((row) => [row.cells[0].innerText, row.cells[1].innerText])"
        )
    )
    jct = Distribution.of(recorded_jct())
    assert jct is not None
    assert shown["mean JCT s"] == f"{jct.mean:.2f}"
    assert shown["p99 JCT s"] == f"{jct.p99:.2f}"


def recorded_jct() -> list[float]:
    """Seconds from the arrival to the end of each finished request of the recording."""
    rows = [json.loads(line) for line in RECORDING.read_text().splitlines()]
    arrived = {row["arrived"]: row["at"] for row in rows if "arrived" in row}
    return [row["at"] - arrived[row["ended"]] for row in rows if row.get("outcome") == "finished"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_no_serious_accessibility_problem(
    browser: Browser, page_url: str, view: str, scheme: str
) -> None:
    if not AXE.exists():
        pytest.skip("needs axe-core (npm install --prefix examples)")
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{page_url}/#{view}")
    if view == "chat":
        ask(page, MARKDOWN.read_text())  # a message is shown as an answer is
        expect(page.locator(".figures")).to_contain_text("tokens/s")
        expect(page.locator("math, .hljs-keyword")).to_have_count(5)
        page.get_by_role("button", name="Settings").click()
        page.get_by_text("Keys", exact=True).click()
    expect(page.locator("main")).not_to_be_empty()
    page.add_script_tag(path=AXE)
    found = page.evaluate("axe.run().then((result) => result.violations)")
    serious = [each["id"] for each in found if each["impact"] in ("serious", "critical")]
    assert serious == []
    context.close()


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, page_url: str, view: str) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.goto(f"{page_url}/#{view}")
    expect(page.locator("main")).not_to_be_empty()
    if view == "replay":
        replay(page)
    if view == "engine":
        page.evaluate(START_A_STORY)
        expect(page.locator(".scroll tbody tr").first).to_be_visible()
    for element in ("html", "main"):
        assert page.locator(element).evaluate("(element) => element.scrollWidth") <= 360
    page.close()
