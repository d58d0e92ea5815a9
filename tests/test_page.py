"""The page in a headless Chromium, over a real server and the demo model.

Screenshots stay under test-artifacts/. The page's policy forbids `eval`, so tests look at elements
instead of waiting for expressions.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_server import live_server
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

import oled_moe
from oled_moe import Engine, EngineConfig
from oled_moe.server import ServerSettings, create_app
from oled_moe.server_backend import Runtime, start_runtime
from oled_moe.server_streams import StreamTiming

FILES = Path(oled_moe.__file__).parent / "page"
ARTIFACTS = Path(__file__).parents[1] / "test-artifacts"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: the page is not tested (apt-get install chromium)"
)

# Its own five seconds are short for a busy machine.
expect.set_options(timeout=60_000)

QUESTION = "What is 12 + 30?"
CODE_QUESTION = "Define task(text), which returns text repeated 4 times."
BAD_TEXT = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


class Served:
    """A backend whose model is there."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def runtime(self) -> Runtime:
        return self._runtime


@pytest.fixture(scope="module")
def backend() -> Iterator[Served]:
    config = EngineConfig(device="emulated", experts_per_layer=24, max_num_seqs=4)
    runtime = start_runtime(lambda: Engine("demo", config), max_waiting=8)
    yield Served(runtime)
    runtime.close()


@pytest.fixture(scope="module")
def url(backend: Served) -> Iterator[str]:
    # Every step has its frame, however fast this machine is.
    settings = ServerSettings(("demo",), timing=StreamTiming(frame_interval_s=0.0))
    with live_server(create_app(backend, settings)) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    ARTIFACTS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@contextmanager
def page_at(browser: Browser, url: str, **looks: Any) -> Iterator[Page]:
    """The page as it first shows; in the end nothing may have been refused or have failed."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **looks})
    context.set_default_timeout(60_000)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    # Replies that tests ask to fail are logged too; scripts and policies fail in other words.
    page.on(
        "console",
        lambda message: (
            problems.append(message.text)
            if message.type == "error" and "Failed to load resource" not in message.text
            else None
        ),
    )
    page.goto(url)
    yield page
    context.close()
    assert not problems


def ask(page: Page, text: str) -> None:
    """With the keyboard alone; the page has put the focus where one types."""
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def finished(page: Page, number: int = 0) -> str:
    """The text of an answer once it is complete."""
    expect(page.locator("#send")).to_be_visible()
    answers = page.locator(".turn.assistant .text")
    expect(answers).to_have_count(number + 1)
    return answers.nth(number).text_content() or ""


def set_threshold(page: Page, value: str) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Threshold").fill(value)
    page.get_by_text("Settings").click()
    page.get_by_label("Message").focus()


def api_answer(url: str, text: str, **fields: Any) -> str:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], **fields}
    reply = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def answer_with(page: Page, *parts: dict[str, Any] | str, is_whole: bool = True) -> None:
    """Have the next questions answered with these deltas, or error messages, as a stream."""
    events = [
        {"error": {"message": part}}
        if isinstance(part, str)
        else {"choices": [{"index": 0, "delta": part, "finish_reason": None}]}
        for part in parts
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    body = ": keep-alive\n\n" + body + ("data: [DONE]\n\n" if is_whole else "")

    def reply(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", reply)


def frame(step: int, changed: list[tuple[int, str | None, str, float]], **more: Any) -> Any:
    """A delta that shows a step of a block of four, the second of its answer."""
    return {
        "content": "",
        "diffusion": {
            "block": 0,
            "step": step,
            "steps_max": 8,
            "ids": [1, 2, 3, 4],
            "masked": 0,
            "changed": [
                {"pos": pos, "from": before, "to": to, "conf": conf}
                for pos, before, to, conf in changed
            ],
            "final": False,
            **more,
        },
    }


# What needs no browser


def test_the_page_holds_no_markup_from_strings_and_nothing_inline_or_foreign() -> None:
    for file in FILES.iterdir():
        text = file.read_text(encoding="utf-8")
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ):
            assert forbidden not in text, f"{file.name}: {forbidden}"
        foreign = re.sub(r'xmlns="[^"]*"', "", text)
        assert not re.search(r"https?://", foreign), file.name
    page = (FILES / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)


def test_every_file_the_page_names_is_there(url: str) -> None:
    for file in FILES.iterdir():
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r'"(/page/[\w.]+)"', text):
            reply = httpx2.get(url + name)
            assert reply.status_code == 200, name
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy


# In the browser


@needs_browser
def test_a_message_is_answered_as_by_the_api(browser: Browser, url: str) -> None:
    with page_at(browser, url) as page:
        grid = page.locator("#grid")
        expect(page.locator("#experts-facts")).to_contain_text("of 576 experts resident")
        before = grid.screenshot()
        ask(page, QUESTION)
        text = finished(page)
        assert text == api_answer(url, QUESTION, max_tokens=256) and "42" in text
        expect(page.locator(".note").last).to_contain_text("tokens in")
        expect(page.locator("#announcer")).to_contain_text(text)
        expect(page.locator("#hit-rate")).to_contain_text("%")
        expect(page.locator("#tpot")).to_contain_text("ms")
        assert grid.screenshot() != before
        expect(page.locator("#layers tr")).to_have_count(6)
        # The second answer is denoised one token at a time: a block can be seen at work.
        set_threshold(page, "1")
        ask(page, CODE_QUESTION)
        page.locator(".turn .token.sure").nth(5).wait_for()
        expect(page.locator(".turn .mask").first).to_be_visible()
        page.screenshot(path=ARTIFACTS / "page-denoising.png")
        text = finished(page, number=1)
        assert text == api_answer(url, CODE_QUESTION, max_tokens=256, threshold=1)
        page.screenshot(path=ARTIFACTS / "page-answered.png")


@needs_browser
def test_a_conversation_goes_on_until_a_new_one_begins(browser: Browser, url: str) -> None:
    sent: list[Any] = []
    with page_at(browser, url) as page:
        page.on(
            "request",
            lambda request: sent.append(request.post_data_json) if request.method == "POST" else 0,
        )
        page.get_by_text("Settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Max tokens").fill("32")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Message").focus()
        ask(page, QUESTION)
        first = finished(page)
        ask(page, "And 1 + 1?")
        finished(page, number=1)
        # The answer under way belongs to the conversation that ends here.
        page.get_by_label("Threshold").fill("1")
        page.get_by_label("Message").focus()
        ask(page, CODE_QUESTION)
        page.locator(".turn .token").first.wait_for()
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)
        page.get_by_role("button", name=QUESTION).click()
        finished(page)
    question = {"role": "user", "content": QUESTION}
    system = {"role": "system", "content": "Be brief."}
    assert sent[0]["messages"] == [system, question]
    assert sent[1]["messages"] == [
        system,
        question,
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And 1 + 1?"},
    ]
    assert sent[3]["messages"] == [system, question]
    assert (sent[0]["max_tokens"], sent[0]["temperature"]) == (32, 0.5)
    assert "threshold" not in sent[0]


@needs_browser
def test_steps_are_drawn_by_confidence_and_settle(browser: Browser, url: str) -> None:
    with page_at(browser, url) as page:
        # Each state stays for as long as a few steps that change nothing.
        quiet = [frame(0, [])] * 5
        first = frame(1, [(0, None, "Sure", 0.99), (2, None, " likely", 0.8)], masked=2)
        second = frame(2, [(3, None, " unsure", 0.3), (2, " likely", " edited", 0.9)], masked=1)
        last = frame(3, [(1, None, " more", 0.96)], final=True)
        final = {"content": "Sure more edited unsure"}
        answer_with(page, *quiet, first, *quiet, second, *quiet, last, final)
        ask(page, "Go")
        expect(page.locator(".turn .mask")).to_have_count(4)
        expect(page.locator(".turn .likely")).to_have_text(" likely")
        expect(page.locator(".turn .edited")).to_have_text(" edited")
        expect(page.locator(".turn .unsure")).to_have_text(" unsure")
        expect(page.locator(".turn .mask")).to_have_count(1)
        expect(page.locator(".note").last).to_contain_text("Block 1, step ")
        # Told apart without colour as well.
        lines = {
            page.locator(f".turn .{grade}").first.evaluate(
                "(token) => getComputedStyle(token).textDecorationStyle"
            )
            for grade in ("sure", "edited", "unsure")
        }
        assert len(lines) == 3
        page.screenshot(path=ARTIFACTS / "page-steps.png")
        assert finished(page) == "Sure more edited unsure"
        expect(page.locator(".turn .token")).to_have_count(0)


@needs_browser
def test_what_models_and_people_write_stays_text(browser: Browser, url: str) -> None:
    with page_at(browser, url) as page:
        drafted = frame(0, [(0, None, BAD_TEXT, 0.9)], final=True)
        answer_with(page, drafted, {"content": BAD_TEXT})
        ask(page, BAD_TEXT)
        expect(page.locator(".turn .token").first).to_have_text(BAD_TEXT)
        assert finished(page) == BAD_TEXT
        expect(page.locator(".turn.user .text")).to_have_text(BAD_TEXT)
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1
        expect(page).to_have_title("OLED-MoE")


@needs_browser
def test_everything_can_be_reached_and_seen_with_the_keyboard(browser: Browser, url: str) -> None:
    with page_at(browser, url) as page:
        expect(page.get_by_label("Message")).to_be_focused()
        page.get_by_text("Skip to the message field").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_label("Message")).to_be_focused()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        expect(page.get_by_label("Message")).to_have_value("one\ntwo")
        # Once round: every control is met, and shows that it has the focus.
        page.get_by_text("Skip to the message field").focus()
        met = []
        for _ in range(16):
            page.keyboard.press("Tab")
            focused = page.locator(":focus")
            if not focused.count():
                break
            met.append(
                focused.evaluate(
                    "(it) => [it.id || it.textContent.trim(), getComputedStyle(it).outlineStyle]"
                )
            )
        assert all(style == "solid" for _, style in met)
        names = [name for name, _ in met]
        for name in ("model", "new-chat", "Settings", "transcript", "prompt", "send"):
            assert name in names
        assert "Numbers by layer" in names and QUESTION in names


@needs_browser
def test_escape_stops_an_answer(browser: Browser, url: str, backend: Served) -> None:
    with page_at(browser, url) as page:
        set_threshold(page, "1")
        ask(page, CODE_QUESTION)
        expect(page.locator(".turn .token").first).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(".note").last).to_contain_text("Stopped.")
        expect(page.locator("#send")).to_be_visible()
        whole = api_answer(url, CODE_QUESTION, max_tokens=256, threshold=1)
        assert whole.startswith(finished(page))
        # Stopping twice does nothing, and the next question is answered.
        page.keyboard.press("Escape")
        set_threshold(page, "")
        ask(page, QUESTION)
        finished(page, number=1)
    assert (backend.runtime().scheduler.num_running, backend.runtime().scheduler.num_waiting) == (
        0,
        0,
    )


@needs_browser
def test_what_goes_wrong_is_one_sentence_and_loses_nothing(browser: Browser, url: str) -> None:
    with page_at(browser, url) as page:
        page.get_by_text("Settings").click()
        page.get_by_label("Max tokens").fill("100000")
        page.get_by_label("Message").focus()
        ask(page, QUESTION)
        expect(page.locator("#problem")).to_contain_text("max_tokens")
        expect(page.get_by_label("Message")).to_have_value(QUESTION)
        expect(page.locator(".turn")).to_have_count(0)
        page.get_by_label("Max tokens").fill("")
        # An answer that breaks off keeps what was final, and says why.
        answer_with(page, {"content": "Half"}, "the engine failed", is_whole=False)
        page.get_by_label("Message").focus()
        page.keyboard.press("Enter")
        assert finished(page) == "Half"
        expect(page.locator(".note").last).to_contain_text("the engine failed")
        expect(page.locator("#problem")).to_be_empty()
        answer_with(page, {"content": "Half again"}, is_whole=False)
        ask(page, "More")
        assert finished(page, number=1) == "Half again"
        expect(page.locator(".note").last).to_contain_text("before it was complete")
        page.route("**/v1/chat/completions", lambda route: route.abort())
        ask(page, "Anybody?")
        expect(page.locator("#problem")).to_contain_text("cannot be reached")


@needs_browser
def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser: Browser, backend: Served) -> None:
    app = create_app(backend, ServerSettings(("demo",), api_keys=("secret",)))
    with live_server(app) as url, page_at(browser, url) as page:
        expect(page.locator("#problem")).to_have_text("The server asks for an API key.")
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        for place in ("#problem", "#experts-facts"):
            expect(page.locator(place)).to_have_text("The server does not know this API key.")
        expect(page.locator("#key-form")).to_be_visible()
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#experts-facts")).to_contain_text("of 576 experts resident")
        expect(page.get_by_label("Message")).to_be_focused()
        ask(page, QUESTION)
        assert "42" in finished(page)
        assert page.evaluate("() => localStorage.length + document.cookie.length") == 0


@needs_browser
def test_narrow_screens_scroll_down_only(browser: Browser, url: str) -> None:
    with page_at(browser, url, viewport={"width": 320, "height": 640}) as page:
        page.get_by_text("Settings").click()
        page.get_by_text("Numbers by layer").click()
        answer_with(page, {"content": "wide" * 40})
        page.get_by_label("Message").focus()
        ask(page, "A word of 160 letters, " + "please" * 20)
        finished(page)
        page.screenshot(path=ARTIFACTS / "page-narrow.png", full_page=True)
        assert page.evaluate("() => document.documentElement.scrollWidth") == 320


@needs_browser
def test_dark_mode_is_dark(browser: Browser, url: str) -> None:
    with page_at(browser, url, color_scheme="dark", reduced_motion="reduce") as page:
        ask(page, QUESTION)
        assert "42" in finished(page)
        page.screenshot(path=ARTIFACTS / "page-dark.png")
        for part in ("body", ".experts", ".turn.assistant .text", "#prompt"):
            color = page.locator(part).evaluate("(it) => getComputedStyle(it).backgroundColor")
            assert max(map(int, re.findall(r"\d+", color)[:3])) < 80, f"{part}: {color}"
        # Nothing moves where people ask for that.
        moving = page.locator(".legend .token").first.evaluate(
            "(it) => getComputedStyle(it).transitionDuration"
        )
        assert moving == "0s"
