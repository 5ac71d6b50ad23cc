"""The report's page as a browser shows it: nothing on the console, nothing wider than the screen, everything in reach of keys.

Run by `make test-browser`, apart from the other tests, by whose names this file is not called: it needs Chromium. What it saw
lies in build/screenshots.
"""

from __future__ import annotations

import pathlib
import shutil
import threading
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import onnx_attnfuse
from onnx_attnfuse.report.files import write_index
from onnx_attnfuse_cli.view import Server
from tests.support.bundled import BUNDLED, name_of

_SHOTS = pathlib.Path(__file__).parents[2] / "build" / "screenshots"
_SCREENS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 360, "height": 740}, "color_scheme": "light"},
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium of the system if there is one, else what `playwright install chromium` brought."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the page of every bundled model, and one that leads to them."""
    folder = tmp_path_factory.mktemp("pages")
    reports = {}
    for path in BUNDLED:
        reports[path.name] = onnx_attnfuse.optimize(path, pictures=True, ep="cuda", arch="sm90").report
        onnx_attnfuse.write_report(reports[path.name], folder / f"{path.stem}.html", path.name)
    write_index(reports, folder / "index.html")
    _SHOTS.mkdir(parents=True, exist_ok=True)
    return folder


def opened(browser: Browser, file: pathlib.Path, screen: str) -> tuple[Page, list[str]]:
    """A page, and all that was said and asked for while it was opened."""
    page = browser.new_context(**_SCREENS[screen]).new_page()
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: request.url in {file.as_uri(), "data:,"} or heard.append(request.url))
    page.goto(file.as_uri())
    return page, heard


def background(page: Page) -> tuple[int, ...]:
    """Red, green and blue behind everything."""
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return tuple(int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))


@pytest.mark.parametrize("screen", _SCREENS)
@pytest.mark.parametrize("name", [*map(name_of, BUNDLED), "index"])
def test_it_opens_without_a_word_and_fits(name: str, screen: str, pages: pathlib.Path, browser: Browser) -> None:
    page, heard = opened(browser, pages / f"{name}.html", screen)
    page.screenshot(path=_SHOTS / f"{name}-{screen}.png", full_page=True)
    assert heard == []
    assert page.evaluate("document.documentElement.scrollWidth") == _SCREENS[screen]["viewport"]["width"]
    assert (sum(background(page)) < 128) == (screen == "dark")
    reach = page.evaluate(
        """[...document.querySelectorAll("body *")].filter(
            node => !node.closest(".scroll, .formula, .definitions, .skip") && node.getBoundingClientRect().right > innerWidth
        ).map(node => node.outerHTML.slice(0, 80))"""
    )
    assert reach == []
    assert page.locator(".drawing").count() == (0 if name == "index" else 2 * page.locator("article").count())
    page.context.close()


def test_text_stands_out_from_what_is_behind_it(pages: pathlib.Path, browser: Browser) -> None:
    for screen in ("light", "dark"):
        page, _ = opened(browser, pages / "t5__dyn18__eager.html", screen)
        weak = page.evaluate(_CONTRAST)
        assert weak == []
        page.context.close()


_CONTRAST = """(() => {
  const channel = value => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const rgb = color => color.match(/[\\d.]+/g).map(Number);
  const light = ([red, green, blue]) => 0.2126 * channel(red) + 0.7152 * channel(green) + 0.0722 * channel(blue);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = rgb(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
  };
  const below = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05) < 4.5;
  const own = node => [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
  const seen = node => node.getClientRects().length && !node.closest("svg, script, style");
  const shown = [...document.querySelectorAll("body *")].filter(node => own(node) && seen(node));
  const weak = shown.filter(node => below(light(rgb(getComputedStyle(node).color)), light(behind(node))));
  const drawn = [...document.querySelectorAll(".drawing g:not(.arrows)")].flatMap(group => {
    const box = light(rgb(getComputedStyle(group.querySelector("rect")).fill));
    return [...group.querySelectorAll("text")].filter(text => below(light(rgb(getComputedStyle(text).fill)), box));
  });
  return [...weak, ...drawn].map(node => node.outerHTML.slice(0, 120));
})()"""
"""The texts whose contrast is below 4.5, by the rules of WCAG 2."""


def test_the_theme_can_be_chosen_and_is_kept(pages: pathlib.Path, browser: Browser) -> None:
    page, heard = opened(browser, pages / "bert__dyn18__sdpa.html", "light")
    light = background(page)
    seen = []
    for _ in range(3):
        page.get_by_role("button", name="Theme").press("Enter")
        seen.append((page.get_by_role("button", name="Theme").inner_text(), background(page) == light))
    assert seen == [("Theme: light", True), ("Theme: dark", False), ("Theme: auto", True)]
    page.get_by_role("button", name="Theme").click()
    page.get_by_role("button", name="Theme").click()
    page.reload()
    assert page.get_by_role("button", name="Theme").inner_text() == "Theme: dark"
    assert heard == []
    page.context.close()


def test_keys_reach_everything(pages: pathlib.Path, browser: Browser) -> None:
    page, _ = opened(browser, pages / "t5__dyn18__eager.html", "narrow")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.className || document.activeElement.tagName")
        )
    assert {"skip", "theme", "scroll", "SUMMARY"} <= reached
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.get_attribute("open") is not None
    page.context.close()


def test_it_prints_whole(pages: pathlib.Path, browser: Browser) -> None:
    page, _ = opened(browser, pages / "llama_past__dyn18__sdpa.html", "light")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 760, "height": 1000})
    clipped = page.evaluate(
        """[...document.querySelectorAll(".scroll")].filter(node => node.scrollWidth > node.clientWidth + 1).length"""
    )
    assert clipped == 0
    page.screenshot(path=_SHOTS / "llama-print.png", full_page=True)
    page.context.close()


def test_a_search_leaves_what_it_finds(pages: pathlib.Path, browser: Browser) -> None:
    """By status, by operator, and by the text of a reason on the card itself."""
    page, heard = opened(browser, pages / "t5__dyn18__eager.html", "narrow")
    every = page.locator("article:visible").count()
    shown: dict[str, int] = {}
    for words in ("", "fused", "decoder encdec", "no such words"):
        page.locator("#find").fill(words)
        shown[words] = page.locator("article:visible").count()
        assert page.locator(".contents li:visible").count() == shown[words]
    assert every > 1
    assert list(shown.values()) == [every, every, 1, 0]
    assert heard == []
    page.context.close()


def test_the_view_serves_the_pages_and_nothing_is_asked_for_elsewhere(pages: pathlib.Path, browser: Browser) -> None:
    with Server() as server:
        server.pages = {f"/{path.name}": path.read_bytes() for path in pages.glob("*.html")}
        server.pages = {**server.pages, "/": server.pages["/index.html"]}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_context(**_SCREENS["light"]).new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: asked.append(message.text))
        page.goto(server.url)
        page.locator("#find").fill("swin")
        page.get_by_role("link", name="swin__dyn18__sdpa.onnx").click()
        assert page.locator("h1").inner_text() == "swin__dyn18__sdpa.onnx"
        assert page.locator("article").count() > 0
        assert all(url.startswith((server.url, "data:")) for url in asked), asked
        page.context.close()
        server.shutdown()


def test_an_index_leads_to_the_pages(pages: pathlib.Path, browser: Browser) -> None:
    page, _ = opened(browser, pages / "index.html", "light")
    page.get_by_role("link", name="swin__dyn18__sdpa.onnx").click()
    assert page.locator("h1").inner_text() == "swin__dyn18__sdpa.onnx"
    page.context.close()
