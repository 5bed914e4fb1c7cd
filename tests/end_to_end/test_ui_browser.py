"""The explorer in a real browser: sixty actions of a user, keys, colours, accessibility, and nothing sent elsewhere."""

from __future__ import annotations

import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from meshwright.ir import files
from meshwright.ir.trace import Span, Trace
from meshwright.report import read_run, render, render_run
from tests.pure.test_report import REPORT
from tests.pure.test_ui import HOSTILE, write_run

pytest.importorskip("uvicorn", reason="the extra `ui` is not installed")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: apt-get install chromium")

RANKS, SPANS = 1024, 10
REFUSED = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
"""What the browser's console says of an answer with an error."""
MOST_TABS, MOST_LOOKS = 80, 200
FOCUSED = """() => {
    const found = document.activeElement;
    return found.getAttribute("aria-label") || found.labels?.[0]?.innerText || found.innerText || "";
}"""
"""The name of the element that has the focus."""
ASKED = "model=turing-nlg-17b&cluster=h100-dgx-ndr400x8&devices=16&batch=16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: two of four ranks, one with a hostile name, and one of 1,024 ranks with 10 spans each."""
    folder = tmp_path_factory.mktemp("explorer") / "runs"
    for name, microbatches in (("first", 2), ("second", 4), (HOSTILE, 2), ("wide", 2)):
        write_run(folder / name, microbatches)
    spans = tuple(
        Span(rank, "compute", f"0{'FB'[index % 2]}{index // 2}", index + 0.001 * rank, index + 0.9 + 0.001 * rank)
        for rank in range(RANKS)
        for index in range(SPANS)
    )
    plan = read_run(folder / "wide").plan
    (folder / "wide" / "ledger.json").unlink()
    for name, source in (("trace.json", "measured"), ("predicted.json", "simulated")):
        files.save(Trace(source=source, plan=plan.digest, spans=spans), folder / "wide" / name)  # type: ignore[arg-type]
    return folder


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address, with its token, of an explorer in a thread of this process."""
    from meshwright.ui.explorer import Explorer
    from meshwright.ui.run_list import RunFolders
    from meshwright.ui.server import application, listening, server_of

    opened = listening(0)
    port = opened.getsockname()[1]
    server = server_of(application(Explorer(), RunFolders(folder), "token", port))
    thread = threading.Thread(target=server.run, args=([opened],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/?token=token"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


MOST_WAITS = 300
"""The number of tenths of a second in which a page must be as it should be after an action."""


class User:
    """A person at a page, and what went wrong there: errors of scripts, requests to other hosts, dialogs."""

    def __init__(self, browser: Browser, address: str, **settings: Any) -> None:
        self.home, self.actions = address.partition("/?")[0], 0
        self.problems: list[str] = []
        self.context: BrowserContext = browser.new_context(**settings)
        self.context.set_default_timeout(60_000)
        self.page: Page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "console", lambda message: self.problems.extend([message.text] * (message.type in ("error", "warning")))
        )
        self.page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        self.page.on("request", lambda request: self._sent(request.url))
        self.page.goto(address)

    def _sent(self, url: str) -> None:
        if not url.startswith((self.home + "/", "blob:", "file:")):
            self.problems.append(f"a request to {url}")

    def asks(self, question: str = ASKED) -> None:
        """Open the explorer with a question, and wait for its answer."""
        self.page.goto(f"{self.home}/runs")
        self.page.goto(f"{self.home}/#{question}")
        self.waits()

    def waits(self) -> None:
        """Wait until the answer to the question of the address is shown, with its timeline."""
        self.page.wait_for_selector("#answer[data-shown]:not([aria-busy])")

    def does(self, what: str, act: Callable[[], object], then: Callable[[], bool]) -> None:
        """An action, and that the page then is as it should be, once a link that was clicked has opened."""
        act()
        if self.page.locator("#answer").count():
            self.waits()
        for _ in range(MOST_WAITS):
            if then():
                break
            self.page.wait_for_timeout(100)
        else:
            shown = self.page.locator("[role=status]").all_inner_texts()
            raise AssertionError(f"action {self.actions + 1}: {what}: {shown}")
        self.actions += 1

    def presses(self, selector: str, key: str, then: Callable[[], bool]) -> None:
        self.does(f"{key} at {selector}", lambda: self.page.locator(selector).first.press(key), then)

    def fills(self, selector: str, text: str, then: Callable[[], bool]) -> None:
        """Type into a field, and leave it."""

        def fill() -> None:
            self.page.locator(selector).fill(text)
            self.page.locator(selector).press("Enter")

        self.does(f"{text!r} into {selector}", fill, then)

    def chooses(self, selector: str, name: str, then: Callable[[], bool]) -> None:
        self.does(f"{name} of {selector}", lambda: self.page.locator(selector).select_option(label=name), then)

    def clicks(self, selector: str, then: Callable[[], bool], text: str = "") -> None:
        place = self.page.locator(selector, has_text=text) if text else self.page.locator(selector)
        self.does(f"click at {selector} {text}", lambda: place.first.click(), then)

    def shows(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def focused(self) -> str:
        """The name of the element with the focus, as soon as the page does not change."""
        for _ in range(MOST_LOOKS):
            with suppress(sync_api.Error):  # the page is changing
                return str(self.page.evaluate(FOCUSED))
            self.page.wait_for_timeout(50)
        raise AssertionError("the page does not stop changing")

    def tabs(self, name: str, key: str, then: Callable[[], bool]) -> None:
        """Move the focus by Tab alone, from where it is, to an element whose name matches, and press a key there."""
        for _ in range(MOST_TABS):
            self.page.keyboard.press("Tab")
            if re.match(name, self.focused()):
                break
        else:
            raise AssertionError(f"{name!r} is not reached by {MOST_TABS} times Tab")

        def press() -> None:
            self.page.keyboard.press(key)  # which does not wait for the page that it opens
            for _ in range(MOST_LOOKS):
                with suppress(sync_api.Error):  # the page is changing
                    if then():
                        break
                self.page.wait_for_timeout(50)
            self.page.wait_for_load_state("networkidle")

        self.does(f"{key} at {name!r}", press, then)

    def ends(self, refused: int = 0) -> None:
        """Nothing went wrong, but that the server has refused so many questions, as it should."""
        assert self.problems == [REFUSED] * refused
        self.context.close()


def test_sixty_actions_of_a_user(browser: Browser, address: str) -> None:
    user = User(browser, address)
    page, field = user.page, user.page.locator
    user.asks()
    facts, status, scroller = "#answer .verdict dl", "figure.timeline .status", "figure.timeline .scroller"
    usual = user.shows(facts)
    seen = [usual]

    def other() -> bool:
        """Whether the facts have changed since they were looked at."""
        seen.append(user.shows(facts))
        return seen[-1] != seen[-2]

    def as_usual() -> bool:
        seen.append(user.shows(facts))
        return seen[-1] == usual

    # What-if questions: every answer has other facts, and the way back has the first ones.
    for name, back in (("devices", "16"), ("batch", "16"), ("seq", ""), ("inside", "1")):
        user.presses(f"#{name}-slider", "ArrowRight", other)
        user.presses(f"#{name}-slider", "ArrowRight", other)
        user.fills(f"#{name}", back, as_usual)
    user.fills("#between", "0.1", other)
    user.fills("#between", "1", as_usual)
    user.clicks('input[value="full"]', other)
    user.clicks('input[value="none"]', lambda: "recompute=none" in page.url)
    user.clicks('input[value="any"]', as_usual)
    user.fills("#devices", "17", lambda: "17 devices do not fill" in user.shows("#answer"))
    user.fills("#devices", "16", as_usual)
    user.chooses("#software", "megatron-lm", other)
    user.chooses("#software", "the cluster's", as_usual)
    user.chooses("#model", "gpt2", lambda: "gpt2 on" in user.shows("#answer h2"))
    user.does("reload", page.reload, lambda: "gpt2 on" in user.shows("#answer h2"))
    user.chooses("#model", "turing-nlg-17b", as_usual)

    # A layout by the table, by a key, by a point of the front, and by words.
    words = field("#layout").input_value
    user.clicks("#layouts > summary", lambda: field("#layouts[open]").count() == 1)
    user.clicks('#layouts tr:nth-child(4) input[name="choice"]', lambda: words() != "")
    before = words()
    user.presses('input[name="choice"]:checked', "ArrowDown", lambda: words() != before)
    assert page.evaluate("() => document.activeElement.name") == "choice"
    user.clicks("circle.d0", lambda: field("circle.chosen").get_attribute("data-key") == words())
    user.clicks("#pin", lambda: "Kept" in user.shows("#state"))
    user.clicks("#fastest", as_usual)
    user.fills("#layout", "tp=3", lambda: "not divisible" in user.shows("#answer"))
    user.fills("#layout", "pp=2,tp=2", lambda: "fastest" in user.shows("#answer .verdict p"))

    # The timeline, by keys.
    user.presses(scroller, "ArrowRight", lambda: user.shows(status).startswith("stage 0: 0F0 (forward)"))
    user.presses(scroller, "ArrowRight", lambda: user.shows(status).startswith("stage 0: 0F1"))
    user.presses(scroller, "ArrowDown", lambda: user.shows(status).startswith("stage 1:"))
    user.presses(scroller, "ArrowUp", lambda: user.shows(status).startswith("stage 0:"))
    pictures = [drawn(page)]

    def redrawn() -> bool:
        page.wait_for_timeout(50)  # the picture follows with the next frame
        pictures.append(drawn(page))
        return pictures[-1] != pictures[-2]

    for key in ("+", "+", "PageDown", "PageUp", "End", "Home", "-", "0"):
        user.presses(scroller, key, redrawn)
    # And by buttons and the pointer.
    for name in ("zoom in", "later", "earlier", "zoom out", "taller rows"):
        user.clicks(f'button[aria-label="{name}"]', redrawn)
    user.chooses(".tools select", "all 16 ranks", redrawn)
    user.fills("input.rank", "5", redrawn)
    user.fills("input.rank", "99", lambda: user.shows(status) == "no such rank here")
    user.fills("input.rank", "", redrawn)
    canvas = field(scroller)
    user.does(
        "point at a span", lambda: canvas.hover(position={"x": 130, "y": 8}),
        lambda: user.shows(status).startswith("rank 0: "),
    )  # fmt: skip
    user.does("zoom by the wheel", lambda: wheel(page, -300), redrawn)
    user.does("drag", lambda: drag(page, canvas), redrawn)
    user.clicks(".as-table summary", lambda: field(".as-table td").count() > 8)

    # Files, commands, comparison.
    for label, name in (("Save this as a page", "plan.html"), ("Save the layout", "layout.json")):
        with page.expect_download() as saved:
            user.clicks("a.button", lambda: True, label)
        assert saved.value.suggested_filename == name
    user.clicks("button.copy", lambda: user.shows("button.copy") in ("Copied", "Marked"))
    user.clicks("#compare", lambda: "lines differ" in user.shows("main"))
    user.clicks("nav a", lambda: "4 runs" in user.shows("main"), "Runs")
    user.fills("#q", "first", lambda: "1 run with" in user.shows("main"))
    user.does("back", page.go_back, lambda: "4 runs" in user.shows("main"))
    for name in ("first", "second"):
        user.clicks(f'input[aria-label="compare {name}"]', lambda: True)
    user.clicks("#compare-runs", lambda: "4 micro-batches" in user.shows("main"))
    user.clicks("nav a", lambda: "4 runs" in user.shows("main"), "Runs")
    user.clicks("td a", lambda: "The ledger" in user.shows("main"), "first")
    page.wait_for_selector("figure.ready")
    user.chooses(".tools select", "only measured", redrawn)
    assert user.actions >= 60
    user.ends(refused=2)  # 17 devices, and tp=3


def drawn(page: Page) -> int:
    """A digest of the timeline's picture."""
    return zlib.crc32(page.locator("figure.timeline .scroller").screenshot())


def wheel(page: Page, by: float) -> None:
    """Turn the wheel while Ctrl is held."""
    page.keyboard.down("Control")
    page.mouse.wheel(0, by)
    page.keyboard.up("Control")


def drag(page: Page, canvas: Locator) -> None:
    """Drag what is shown to the left."""
    canvas.hover(position={"x": 400, "y": 8})
    page.mouse.down()
    canvas.hover(position={"x": 250, "y": 8})
    page.mouse.up()


def test_all_views_are_reached_by_keys_alone(browser: Browser, address: str) -> None:
    """A path through explorer, layouts, timeline, export, comparison, runs and a run: Tab, Enter, Space and arrows."""
    user = User(browser, address)
    page, words = user.page, user.page.locator("#layout").input_value
    status = "figure.timeline .status"
    user.asks()

    def shows(text: str, place: str = "main") -> Callable[[], bool]:
        return lambda: text in user.shows(place)

    user.tabs("Skip to the content", "Enter", lambda: page.evaluate("() => document.activeElement.id") == "content")
    user.tabs("Keep to compare", "Enter", shows("Kept", "#state"))
    user.tabs(r"\d+ layouts as a table", "Enter", lambda: page.locator("#layouts[open]").count() == 1)
    user.tabs(r".*micro_batch=", "ArrowDown", lambda: words() != "")
    user.tabs("timeline", "ArrowRight", shows("stage 0: 0F0", status))
    user.tabs("copy: ", "Enter", lambda: user.shows("button.copy") in ("Copied", "Marked"))
    with page.expect_download() as saved:
        user.tabs("Save the layout", "Enter", lambda: True)
    assert saved.value.suggested_filename == "layout.json"
    user.tabs("Compare with", "Enter", shows("lines differ"))
    user.tabs("Runs$", "Enter", shows("4 runs"))
    user.tabs("compare first$", "Space", shows("Mark", "#pair-state"))
    user.tabs("compare second$", "Space", lambda: page.locator("#compare-runs").is_enabled())
    user.tabs("Compare the plans", "Enter", shows("4 micro-batches"))
    user.tabs("Runs$", "Enter", shows("4 runs"))
    user.tabs("first$", "Enter", shows("The ledger"))
    page.wait_for_selector("figure.ready")
    user.tabs("timeline", "ArrowRight", shows("rank 0 predicted: ", status))
    user.ends()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 800), ("light", 800)])
def test_pages_are_accessible_and_fit_the_window(browser: Browser, address: str, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    user = User(
        browser, address, color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True
    )  # axe is run in the page
    user.asks()
    for path in ("", "/runs", "/run?name=first", "/compare?old=run:first&new=run:second", "/compare", "/run?name=no"):
        if path:
            user.page.goto(user.home + path)
        if path.startswith("/run?name=first"):
            user.page.wait_for_selector("figure.ready")
        violations = axe.Axe().run(user.page).response["violations"]
        assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in violations] == [], path
        assert user.page.evaluate("() => document.documentElement.scrollWidth") <= width, path
    user.ends(refused=1)  # the run that does not exist


def test_colours_follow_the_system(browser: Browser, address: str) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        user = User(browser, address, color_scheme=scheme)
        grounds.add(user.page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
        user.ends()
    assert len(grounds) == 2


def test_a_timeline_of_1024_ranks_is_drawn_and_reached_by_keys(browser: Browser, address: str) -> None:
    user = User(browser, address)
    page = user.page
    page.goto(f"{user.home}/run?name=wide")
    page.wait_for_selector("figure.ready")
    page.locator(".tools select").select_option(label="only measured")
    scroller = page.locator("figure.timeline .scroller")
    scroller.focus()
    scroller.press("ArrowRight")
    for _ in range(40):
        scroller.press("ArrowDown")
    assert user.shows("figure.timeline .status").startswith("rank 40 measured: 0F0")
    colours = page.evaluate(
        """() => {
            const canvas = document.querySelector("figure.timeline .scroller canvas"), pen = canvas.getContext("2d");
            const data = pen.getImageData(canvas.width / 3, 0, canvas.width / 2, canvas.height).data, found = new Set();
            for (let index = 0; index < data.length; index += 4) found.add(data.slice(index, index + 3).join());
            return found.size;
        }"""
    )
    assert colours >= 3
    page.locator("input.rank").fill(str(RANKS - 1))
    scroller.focus()
    scroller.press("ArrowRight")
    assert user.shows("figure.timeline .status").startswith(f"rank {RANKS - 1} measured: 0F0")
    user.ends()


def test_hostile_names_run_no_script(browser: Browser, address: str) -> None:
    user = User(browser, address)
    user.page.goto(f"{user.home}/runs")
    user.page.locator("td a", has_text="onerror").click()
    user.page.wait_for_selector("figure.ready")
    scroller = user.page.locator("figure.timeline .scroller")
    scroller.focus()
    for key in ("ArrowRight", "ArrowDown"):
        scroller.press(key)
    assert HOSTILE in user.shows("figure.timeline .status")
    user.page.locator(".as-table summary").click()
    user.page.goto(f"{user.home}/compare?old=run:first&new={HOSTILE}")
    assert user.page.locator("img").count() == 0
    user.ends()


def test_static_pages_draw_their_timeline_alone(browser: Browser, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_run(read_run(folder / "first")), encoding="utf-8")
    user = User(browser, page.as_uri())
    user.page.wait_for_selector("figure.ready")
    assert user.page.locator(".tools select option").all_inner_texts() == [
        "all 4 ranks",
        "only predicted",
        "only measured",
    ]
    assert user.page.evaluate("() => document.querySelectorAll('noscript svg').length") == 0  # a picture for others
    user.ends()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_static_pages_are_accessible_and_fit_the_window(
    browser: Browser, folder: Path, tmp_path: Path, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    pages = {"report": render_run(read_run(folder / "first")), "plan --report": render(REPORT)}
    for name, text in pages.items():
        page = tmp_path / "page.html"
        page.write_text(text, encoding="utf-8")
        user = User(
            browser, page.as_uri(), color_scheme=scheme, viewport={"width": 800, "height": 900}, bypass_csp=True
        )  # axe is run in the page
        user.page.wait_for_selector("figure.ready")
        violations = axe.Axe().run(user.page).response["violations"]
        assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in violations] == [], name
        assert user.page.evaluate("() => document.documentElement.scrollWidth") <= 800, name
        user.ends()


def test_without_scripts_a_static_page_shows_the_picture(browser: Browser, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_run(read_run(folder / "first")), encoding="utf-8")
    user = User(browser, page.as_uri(), java_script_enabled=False)
    assert user.page.locator('svg[aria-label^="timeline of 4 ranks"]').is_visible()
    user.ends()


def test_a_page_of_another_site_gets_nothing(browser: Browser, address: str) -> None:
    user = User(browser, address)
    other = user.context.new_page()
    other.route("http://evil.example/*", lambda route: route.fulfill(body="<p>other</p>", content_type="text/html"))
    other.goto("http://evil.example/")
    answers = other.evaluate(
        """async (home) => {
            const answers = [];
            for (const mode of ["cors", "no-cors"]) {
                try {
                    const answer = await fetch(`${home}/runs`, { mode, credentials: "include" });
                    answers.push(await answer.text());
                } catch (error) { answers.push("refused"); }
            }
            return answers;
        }""",
        user.home,
    )
    assert all(answer in ("refused", "") for answer in answers)
    user.context.close()


def test_a_server_that_has_ended_is_told(browser: Browser, tmp_path: Path) -> None:
    with served(tmp_path) as url:
        user = User(browser, url)
        user.asks()
    user.page.locator("#devices").fill("32")
    user.waits()
    assert "does not answer. Is `meshwright ui` still running?" in user.shows("#state")
    user.context.close()
