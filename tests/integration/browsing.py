"""A real browser on a real ``headwater ui``, for tests of the dashboard's page."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import forked
import pytest
from command import ROOT

LIMIT_S = 300.0
"""Generous: tests share the machine with other work."""

AXE = ROOT / "tests" / "data" / "axe.min.js"


def chromium() -> str:
    """The browser of the system. ``make setup-browser`` installs it on Debian."""
    told = os.environ.get("HEADWATER_CHROMIUM")
    found = told or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        unavailable("no Chromium: make setup-browser, or set HEADWATER_CHROMIUM")
    return found


def unavailable(reason: str) -> NoReturn:
    """Skip, unless HEADWATER_REQUIRE_BROWSER=1 says that there must be a browser."""
    if os.environ.get("HEADWATER_REQUIRE_BROWSER") == "1":
        pytest.fail(f"HEADWATER_REQUIRE_BROWSER=1, but {reason}")
    pytest.skip(reason)


class Dashboard:
    """``headwater ui`` as a separate process, at any free port."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = ["-m", "headwater", "ui", folder, "--port", "0", "--no-browser", *arguments]
        self._process = forked.popen(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.output: list[str] = []
        self._found = threading.Event()
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()
        if not self._found.wait(LIMIT_S):
            raise AssertionError(f"headwater ui printed no address: {self.output}")
        assert self.url, self.output

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append(str(line))
            if found := re.search(r"http://127\.0\.0\.1:\d+/\S*", str(line)):
                self.url = found[0]
                self._found.set()
        self._found.set()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("no playwright: pip install playwright")
    with sync_playwright() as playwright:
        # A test may run as root, for which Chromium has no sandbox.
        opened = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"], timeout=LIMIT_S * 1000)
        yield opened
        opened.close()


@contextlib.contextmanager
def page_of(opened: Any, url: str, *, width: int = 1280, scheme: str = "light", **options: Any) -> Iterator[Any]:
    """A new page. An error in it, or a request that leaves this machine, fails the test."""
    context = opened.new_context(viewport={"width": width, "height": 860}, color_scheme=scheme, **options)
    context.set_default_timeout(LIMIT_S * 1000)
    page = context.new_page()
    errors: list[str] = []
    foreign: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: _note(errors, message))
    page.on("request", lambda request: None if _is_near(request.url, url) else foreign.append(request.url))
    page.goto(url)
    yield page
    context.close()
    assert not errors, errors
    assert not foreign, foreign


def _note(errors: list[str], message: Any) -> None:
    # The browser itself reports answers such as 404, which the page shows as sentences.
    if message.type == "error" and "Failed to load resource" not in message.text:
        errors.append(message.text)


def _is_near(asked: str, url: str) -> bool:
    return asked.startswith((url.split("?")[0].split("#")[0].rstrip("/"), "data:", "blob:"))


def until(page: Any, expression: str, arg: object = None) -> None:
    """Wait until an expression, or a function of ``arg``, is true in the page. Playwright's own wait needs ``eval``,
    which the page forbids."""
    deadline = time.monotonic() + LIMIT_S
    while not page.evaluate(expression, arg):
        assert time.monotonic() < deadline, f"not true in {LIMIT_S:.0f} s: {expression}"
        page.wait_for_timeout(50)


def shows(page: Any, read: Callable[[], object], expected: object) -> None:
    """Wait until the page shows a value. What it showed before may stay for a moment after a click."""
    deadline = time.monotonic() + LIMIT_S
    while (seen := read()) != expected:
        assert time.monotonic() < deadline, f"{seen}, and not {expected}"
        page.wait_for_timeout(50)


def drawn(page: Any) -> None:
    """Wait until what the page shows also works: charts are drawn, and keys are listened to, after the next frame."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))")


def settled(page: Any) -> None:
    """Wait until the page shows its data. After a change of the address, it shows the page before for a moment."""
    drawn(page)
    page.locator("main").wait_for()
    until(page, "document.querySelector('main').innerText.trim().length > 40")
    until(page, "!document.querySelector('main .state.loading, main .is-old')")


def names_of(page: Any) -> set[str]:
    """The runs that the first page lists."""
    page.wait_for_selector("table.runs tbody tr")
    return set(page.locator("table.runs tbody .row-link").all_inner_texts())


def serious_findings(page: Any, within: str = "html") -> list[str]:
    """What axe finds that is serious or critical: rule, element and reason."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    run = "async (within) => (await axe.run(within, {resultTypes: ['violations']})).violations"
    result = page.evaluate(run, within)
    return [
        f"{each['id']} ({each['impact']}): {node['target']} {node['failureSummary']}"
        for each in result
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"][:3]
    ]
