"""Writes the pictures of docs/dashboard.md and of the README, if HEADWATER_SCREENSHOTS=1 asks for them."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from browsing import Dashboard, browser, names_of, page_of, until
from command import ROOT, headwater

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("HEADWATER_SCREENSHOTS"), reason="writes pictures into docs/images"),
]

SHOTS = (
    ("dashboard-runs", "", "table.runs"),
    ("dashboard", "run/quickstart-async", ".ledger"),
    ("dashboard-timeline", "run/quickstart-async/timeline", ".timeline canvas"),
    ("dashboard-rollouts", "run/quickstart-async/rollouts?show=groups", "table.rollouts"),
    ("dashboard-tokens", "run/quickstart-tools/rollouts?sort=length", "table.rollouts"),
)


def test_screenshots(tmp_path: Path) -> None:
    folder = Path(os.environ.get("HEADWATER_SCREENSHOT_RUNS") or tmp_path / "runs")
    if not folder.exists():
        for recipe, steps in (("quickstart-async", 60), ("quickstart", 60), ("quickstart-tools", 6)):
            trained = headwater("train", recipe, f"trainer.total_steps={steps}", f"run.root={folder}",
                                "trainer.trace=true", "trainer.save_learner_logprobs=true")  # fmt: skip
            assert trained.code == 0, trained.stderr
    images = ROOT / "docs" / "images"
    served = Dashboard(folder)
    with browser() as chrome, closing(served):
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            with page_of(chrome, served.url, scheme=scheme) as page:
                names_of(page)
                for name, place, wait in SHOTS:
                    if suffix and name != "dashboard":
                        continue
                    page.goto(f"{served.url}#/{place}")
                    page.locator(wait).first.wait_for()
                    until(page, "!document.querySelector('main .state.loading')")
                    if name == "dashboard-tokens":
                        page.locator("table.rollouts .row-link").first.click()
                        page.locator(".token-field .tok.is-chosen").wait_for()
                        page.get_by_label("Colour by").select_option("logprobs")
                    page.wait_for_timeout(500)
                    page.screenshot(path=images / f"{name}{suffix}.png")
