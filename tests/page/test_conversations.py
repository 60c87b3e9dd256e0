import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.page.test_page import MARKDOWN, SEED, ask, await_text, seed_chat


def titles(page: Page) -> list[str]:
    return page.locator(".entry a").all_inner_texts()


def message(number: int, role: str, content: str, **fields: object) -> dict[str, Any]:
    """A message below the one before it."""
    below: dict[str, Any] = {"id": number, "parent": number - 1, "children": [], "chosen": 0}
    return below | {"role": role, "content": content} | fields


def tree(*messages: dict[str, Any]) -> dict[str, Any]:
    """The fields of a conversation with these messages, one below the other."""
    for before in messages[:-1]:
        before["children"] = [before["id"] + 1]
    nodes = {str(each["id"]): each for each in messages}
    return {"nodes": nodes, "root": {"children": [1], "chosen": 0}, "next": len(messages) + 1}


def test_an_answer_goes_on_after_the_page_was_reloaded(page: Page, page_url: str) -> None:
    posts: list[str] = []
    page.on("request", lambda each: posts.append(each.url) if each.method == "POST" else None)
    seed_chat(page, page_url, min_tokens=400, max_tokens=400)
    ask(page, "Tell me a story.")
    await_text(page)
    page.reload()
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".figures")).to_contain_text("400 tokens")
    expect(page.locator(".figures")).to_contain_text("cut off by max tokens")
    assert len(posts) == 1
    page.get_by_role("button", name="Why slow?").click()
    expect(page.locator(".why")).to_contain_text("output tokens")
    expect(page.locator(".context")).to_contain_text("tokens of context")


def test_conversations_are_listed_searched_renamed_exported_imported_and_deleted(
    page: Page, page_url: str, tmp_path: Path
) -> None:
    page.goto(f"{page_url}/")
    earlier = tree(message(1, "user", "From before")) | {"system": "", "settings": {}}
    page.evaluate("text => localStorage.setItem('podway-chat', text)", json.dumps(earlier))
    page.reload()
    expect(page.locator(".entry a")).to_have_text(["From before"])
    page.evaluate(SEED, tree(message(1, "user", "About a zebra"), message(2, "assistant", "Grass")))
    expect(page.locator(".entry a")).to_have_count(2)
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search chats")).to_be_focused()
    page.keyboard.type("grass ZEBRA")
    expect(page.locator(".entry a")).to_have_text(["About a zebra"])
    page.get_by_label("Search chats").fill("")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Title").fill("Animals")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".entry a[aria-current]")).to_have_text("Animals")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    download.value.save_as(tmp_path / "all.json")
    assert len(json.loads((tmp_path / "all.json").read_text())["conversations"]) == 2
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".entry a")).to_have_count(1)
    page.get_by_label("Import").set_input_files(tmp_path / "all.json")
    expect(page.locator(".entry a")).to_have_count(3)
    assert sorted(titles(page)) == ["Animals", "From before", "From before"]
    (tmp_path / "other.json").write_text('{"nodes": {"1": {"children": [1]}}}')
    page.get_by_label("Import").set_input_files(tmp_path / "other.json")
    expect(page.get_by_role("alert")).to_contain_text("it is not an exported conversation")
    page.keyboard.press("Control+Shift+o")
    expect(page.locator(".welcome")).to_be_visible()


# The page hears what other tabs say only from `hear` on.
DEAFEN = """const unheard = [];
let isDeaf = true;
window.hear = () => { isDeaf = false; unheard.forEach((each) => each()); };
window.BroadcastChannel = class extends BroadcastChannel {
    set onmessage(handler) {
        super.onmessage = (event) => isDeaf ? unheard.push(() => handler(event)) : handler(event);
    }
};"""


def test_what_two_tabs_change_in_one_chat_at_once_is_kept(
    context: BrowserContext, page: Page, page_url: str
) -> None:
    page.goto(f"{page_url}/")
    fields = {"settings": {"min_tokens": 100, "max_tokens": 100}}
    page.evaluate(SEED, tree(message(1, "user", "One"), message(2, "assistant", "Two")) | fields)
    expect(page.locator(".message")).to_have_count(2)
    other = context.new_page()
    other.add_init_script(DEAFEN)
    other.goto(page.url)
    expect(other.locator(".message")).to_have_count(2)
    other.get_by_role("button", name="Settings").click()
    ask(page, "From the first tab")
    ask(other, "From the second tab")
    other.get_by_label("System prompt").fill("Be brief.")
    for tab, place in ((page, "first"), (other, "second")):
        expect(tab.locator(".figures").last).to_contain_text("100 tokens")
        expect(tab.locator(".message.user").last).to_contain_text(f"From the {place} tab")
    other.evaluate("hear()")
    for tab in (page, other):
        expect(tab.locator(".branch")).to_contain_text("/ 2")
    page.locator(".entry a[aria-current]").click()
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Title").fill("Both")
    page.keyboard.press("Enter")
    expect(other.locator(".entry a[aria-current]")).to_have_text("Both")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    shown = set()
    for step in ("Previous", "Next"):
        page.get_by_role("button", name=f"{step} branch").click()
        shown.add(page.locator(".message.user .body").last.inner_text())
        expect(page.locator(".figures").last).to_contain_text("100 tokens")
    assert shown == {"From the first tab", "From the second tab"}


# Whether the field of a label has the focus as soon as it is in the page: no key may be lost.
NOTE_FOCUS = """label => {
    window.hasFocus = [];
    new MutationObserver((changes, observer) => {
        const field = document.querySelector(`[aria-label="${label}"]`);
        if (!field) return;
        window.hasFocus.push(document.activeElement === field);
        observer.disconnect();
    }).observe(document.body, {childList: true, subtree: true});
}"""


def test_a_branch_is_a_conversation_of_its_own_and_texts_can_be_copied(
    context: BrowserContext, page: Page, page_url: str
) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{page_url}/")
    code = "Look:\n```sh\nls -l\n```"
    messages = [message(1, "user", "One"), message(2, "assistant", code)]
    page.evaluate(SEED, tree(*messages, message(3, "user", "Two")))
    page.get_by_role("button", name="Copy code").click()
    assert page.evaluate("navigator.clipboard.readText()") == "ls -l"
    page.locator(".message.assistant").get_by_role("button", name="Copy", exact=True).click()
    assert page.evaluate("navigator.clipboard.readText()") == code
    page.get_by_role("button", name="Branch", exact=True).click()
    expect(page.locator(".entry a[aria-current]")).to_have_text("One (branch)")
    expect(page.locator(".message")).to_have_count(2)
    page.evaluate(NOTE_FOCUS, "Edit message")
    page.locator("#message").press("ArrowUp")
    expect(page.get_by_label("Edit message")).to_have_value("One")
    assert page.evaluate("hasFocus") == [True]
    page.keyboard.press("Escape")
    expect(page.locator(".message.user .body")).to_have_text("One")
    page.evaluate(NOTE_FOCUS, "Title")
    page.get_by_role("button", name="Rename").click()
    expect(page.get_by_label("Title")).to_have_value("One (branch)")
    assert page.evaluate("hasFocus") == [True]
    page.keyboard.type("Files")
    page.keyboard.press("Enter")
    expect(page.locator(".entry a[aria-current]")).to_have_text("Files")


def test_markdown_is_shown_whole_and_never_becomes_markup(page: Page, page_url: str) -> None:
    page.goto(f"{page_url}/")
    fields = {"reasoning": "Hidden *thought*", "finish": "stop", "model": "builtin"}
    shown = message(2, "assistant", MARKDOWN.read_text(), **fields)
    page.evaluate(SEED, tree(message(1, "user", "Show all"), shown))
    body = page.locator(".message.assistant .body")
    expect(body.locator(".hljs-keyword").first).to_have_text("def")
    expect(body.locator("math")).to_have_count(3)
    expect(body.locator("li li li")).to_have_text("deep")
    expect(body.get_by_role("heading", name="Title")).to_be_visible()
    for selector, text in {"del": "old", "p > code": "<b>", "td.align-right": "x2"}.items():
        expect(body.locator(selector)).to_have_text(text)
    expect(body.locator("li.task input")).to_be_checked()
    expect(body.locator("blockquote")).to_have_text("quoted")
    expect(body.locator(".footnotes li")).to_contain_text("The note.")
    expect(body).to_contain_text("<img src=x onerror=alert(1)> <b> note1")
    expect(body).to_contain_text("Costs $5 and $6")
    hrefs = body.locator("a[target]").evaluate_all("(all) => all.map((each) => each.href)")
    assert hrefs == ["https://example.com/", "https://example.com/a.png"]
    assert body.locator("img, script, [onerror]").count() == 0
    body.locator("sup a").click()
    expect(page.locator(".message")).to_have_count(2)  # the address names the same conversation
    expect(page.get_by_text("Hidden thought")).to_be_hidden()
    page.get_by_text("Reasoning", exact=True).click()
    expect(page.get_by_text("Hidden thought")).to_be_visible()


CALL = {"index": 0, "id": "call_1", "function": {"name": "sum", "arguments": '{"a":2}'}}
ANSWERS = [
    {"index": 0, "delta": {"tool_calls": [CALL]}, "finish_reason": "tool_calls"},
    {"index": 0, "delta": {"content": "It is 5."}, "finish_reason": "stop"},
]


def test_files_tools_and_their_results_are_sent(page: Page, page_url: str) -> None:
    bodies: list[dict[str, Any]] = []

    def respond(route: Route) -> None:
        body = route.request.post_data_json
        assert body is not None
        choice = ANSWERS[len(bodies)]
        bodies.append(body)
        text = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=text)

    page.route("**/v1/chat/completions", respond)
    page.route("**/timeline", lambda route: route.fulfill(json={"choices": []}))
    page.goto(f"{page_url}/")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    tool = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}
    page.get_by_label("Tools").fill("[{")
    expect(page.get_by_role("alert")).to_contain_text("Tools are not JSON")
    page.get_by_label("Tools").fill(json.dumps([tool]))
    data = {"name": "a.txt", "mimeType": "text/plain", "buffer": b"2 + 3 ```"}
    page.get_by_label("Attach").set_input_files(data)  # type: ignore[arg-type]
    expect(page.locator(".composer .file")).to_contain_text("a.txt")
    ask(page, "Compute it.")
    page.get_by_label("Result of sum").fill("5")
    page.get_by_role("button", name="Send result").click()
    expect(page.locator(".message.assistant").last).to_contain_text("It is 5.")
    system, asked, called, result = bodies[1].pop("messages")
    assert bodies[0]["messages"] == [system, asked]
    assert system == {"role": "system", "content": "Be brief."}
    assert asked["content"] == "a.txt:\n````\n2 + 3 ```\n````\n\nCompute it."
    call = {"id": "call_1", "type": "function"} | {"function": CALL["function"]}
    assert called == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "5"}
    assert (bodies[1]["temperature"], bodies[1]["tools"]) == (0.5, [tool])


def test_a_preset_has_the_system_prompt_and_the_settings(page: Page, page_url: str) -> None:
    page.goto(f"{page_url}/")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Top-k").fill("5")
    page.get_by_label("Name").fill("brief")
    page.get_by_role("button", name="Save preset").click()
    expect(page.get_by_role("button", name="Delete preset")).to_be_visible()
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt")).to_have_value("")
    page.get_by_label("Temperature").fill("9")  # the browser says what is allowed
    page.get_by_label("Preset").select_option("brief")
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(page.get_by_label("Top-k")).to_have_value("5")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello!")
    body = sent.value.post_data_json
    assert body is not None
    assert body["top_k"] == 5
    assert "temperature" not in body
    expect(page.locator(".figures")).to_contain_text("tokens/s")


@pytest.mark.parametrize("width", [360, 3840])
def test_a_long_answer_fits_the_screen(page: Page, page_url: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(f"{page_url}/")
    long = "| a | b |\n|--|--|\n| " + "x" * 500 + " | y |\n\n```\n" + "z" * 500 + "\n```\n"
    page.evaluate(SEED, tree(message(1, "user", "w" * 500), message(2, "assistant", long)))
    expect(page.locator(".code")).to_be_visible()
    for element in ("html", "main", ".messages"):
        assert page.locator(element).evaluate("(each) => each.scrollWidth") <= width


def test_an_answer_whose_network_was_lost_is_read_again(page: Page, page_url: str) -> None:
    delta = {"choices": [{"index": 0, "delta": {"content": "Hello "}, "finish_reason": None}]}
    cut = f"data: {json.dumps(delta)}\n\n"
    delta["choices"][0] |= {"delta": {"content": "you."}, "finish_reason": "stop"}
    whole = f"{cut}data: {json.dumps(delta)}\n\ndata: [DONE]\n\n"
    names: list[str] = []

    def respond(route: Route) -> None:
        names.append(route.request.headers.get("x-conversation-id", route.request.url))
        body = cut if route.request.method == "POST" else whole
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", respond)
    page.route("**/v1/stream/*", respond)
    page.route("**/timeline", lambda route: route.fulfill(json={"choices": []}))
    page.goto(f"{page_url}/")
    ask(page, "Hello!")
    expect(page.locator(".message.assistant .body")).to_have_text("Hello you.")
    expect(page.locator("#send")).to_be_visible()
    assert names[1] == f"{page_url}/v1/stream/{quote(names[0], safe='')}"


def test_an_answer_of_a_server_that_ends_goes_on_in_the_next_one(
    context: BrowserContext, page_url: str
) -> None:
    page = context.new_page()  # the console names each 503
    delta = {"choices": [{"index": 0, "delta": {"content": "Hello."}, "finish_reason": "stop"}]}
    ends = {"error": {"code": "unavailable", "message": "The server is shutting down."}}
    answers = [(503, ends)] * 8 + [(200, delta)]  # it loads its model

    def respond(route: Route) -> None:
        status, event = (200, ends) if route.request.method == "POST" else answers.pop(0)
        route.fulfill(
            status=status, content_type="text/event-stream", body=f"data: {json.dumps(event)}\n\n"
        )

    page.clock.install()
    page.route("**/v1/chat/completions", respond)
    page.route("**/v1/stream/*", respond)
    page.route("**/timeline", lambda route: route.fulfill(json={"choices": []}))
    page.goto(f"{page_url}/")
    ask(page, "Hello!")
    for _ in range(2 * len(answers)):
        page.clock.run_for(1000)
    expect(page.locator(".message.assistant .body")).to_have_text("Hello.")


def test_a_text_that_is_nested_too_deeply_is_shown_as_it_is(page: Page, page_url: str) -> None:
    page.goto(f"{page_url}/")
    deep = ">" * 20_000 + " end"
    page.evaluate(SEED, tree(message(1, "user", "Deep"), message(2, "assistant", deep)))
    expect(page.locator(".message.assistant .plain")).to_contain_text("end")


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_away(
    page: Page, page_url: str
) -> None:
    seed_chat(page, page_url, min_tokens=16000, max_tokens=16050)
    ask(page, "Tell me a story.")
    await_text(page)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".welcome")).to_be_visible()
    page.goto(f"{page_url}/#engine")
    expect(page.locator("[data-figure=running]")).to_have_text("0")
    page.goto(f"{page_url}/#chat")
    expect(page.get_by_label("Search chats")).to_be_visible()
    assert titles(page) == []


def test_models_are_shown_with_their_state_and_chosen_per_conversation(
    page: Page, page_url: str
) -> None:
    builtin = {"id": "builtin", "task": "generate", "parent": None, "max_model_len": 100}
    models = [
        builtin | {"status": {"value": "loaded"}},
        builtin | {"id": "law", "parent": "builtin", "status": {"value": "loaded"}},
        builtin | {"id": "large", "task": None, "status": {"value": "unloaded"}},
        builtin | {"id": "vectors", "task": "embed", "status": {"value": "loaded"}},
    ]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    page.goto(f"{page_url}/")
    shown = ["builtin", "law (adapter of builtin)", "large (unloaded)"]
    expect(page.get_by_label("Model").locator("option")).to_have_text(shown)
    page.evaluate(SEED, tree(message(1, "user", "One")) | {"model": "law"})
    expect(page.get_by_label("Model")).to_have_value("law")
    page.get_by_label("Model").select_option("builtin")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello!")
    body = sent.value.post_data_json
    assert body is not None
    assert body["model"] == "builtin"
    expect(page.locator(".context")).to_contain_text("of 100 tokens of context")


GROW = """async (text) => {
    const { Markdown } = await import("/page/markdown/markdown.js");
    const { html, render } = await import("/page/vendor/htm-preact.js");
    const [grown, whole] = [document.createElement("div"), document.createElement("div")];
    for (let end = 1; end <= text.length; end += 1)
        render(html`<${Markdown} text=${text.slice(0, end)} />`, grown);
    render(html`<${Markdown} text=${text} />`, whole);
    return [grown.innerHTML, whole.innerHTML];
}"""


def test_an_answer_that_grew_is_shown_as_if_it_had_come_at_once(page: Page, page_url: str) -> None:
    page.goto(f"{page_url}/")
    whole = MARKDOWN.read_text().replace("```python", "```")  # colours come later
    without_notes = whole.rpartition("[^1]:")[0]
    lists = "a\n- b\n\n      c\n\n    d\n\n\te\n"
    for text in (whole, without_notes * 2, lists * 3):
        grown, at_once = page.evaluate(GROW, text)
        assert grown == at_once


def test_a_browser_that_stores_nothing_can_chat(page: Page, page_url: str) -> None:
    page.add_init_script("indexedDB.open = () => { throw new Error('it is off'); };")
    page.goto(f"{page_url}/")
    expect(page.get_by_role("alert")).to_contain_text("This browser stores no chats")
    ask(page, "Hello!")
    expect(page.locator(".figures")).to_contain_text("tokens/s")
