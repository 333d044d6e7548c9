"""The dashboard in a real Chromium, over runs with what a short training does not make: tools, rewards of turns, long
responses, ten thousand steps, many data sources; and over a running server."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from browsing import Dashboard, browser, drawn, page_of, serious_findings, settled, shows, until
from dashboard import parts
from dashboard.pictured import save_pictures
from running import Running

from headwater.observe.run_directory import MetricsRecord, RunDirectory
from headwater.trainer.recorder import write_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dashboard_browser")]

NUM_STEPS = 10_000
PAGE_TOKENS = 4096
ENGINE = ("running_mean", "running_max", "waiting_mean", "waiting_max", "kv_used_mean", "kv_used_max",
          "cache_hit_fraction", "generated_tokens", "prefilled_tokens", "cached_tokens", "preempted", "aborted",
          "failed", "media_computed", "media_cached", "media_tower_s", "media_wait_s")  # fmt: skip
"""Numbers of the engine, as docs/metrics.md lists them."""
SOURCES = [f"source-{place}" for place in range(9)]


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, chrome: Any) -> Path:
    root = tmp_path_factory.mktemp("details") / "runs"
    tools = parts.make_run(root, "tools")
    numbers = {f"engine/{name}": place + 0.5 for place, name in enumerate(ENGINE)}
    for step in (4, 5):
        parts.add_metrics(tools, step, **numbers, **{"time/generate_s": 1.5})
        tools.append_metrics(MetricsRecord("eval", step, 1020.0 + step, evaluation(["a", "b"])).to_json())
    save_pictures(parts.make_run(root, "pictures", num_steps=1), step=2)
    long = parts.make_run(root, "long", num_steps=1)
    save_long_rollout(long)
    with long.metrics_file.open("a", encoding="utf-8") as file:
        for step in range(2, NUM_STEPS + 1):
            record = MetricsRecord("train", step, 1000.0 + step, {"reward/mean": step / 8, "time/step_s": 1.0})
            file.write(json.dumps(record.to_json()) + "\n")
    long.append_metrics(MetricsRecord("eval", 1, 1000.0, evaluation(SOURCES)).to_json())
    return root


def evaluation(sources: list[str]) -> dict[str, float]:
    values = {"reward/mean": 0.5, "reward/acc/mean": 0.25}
    for source in sources:
        values |= {f"reward/{source}/mean": 0.5, f"reward/{source}/acc/mean": 0.25}
    return values


def save_long_rollout(run: RunDirectory) -> None:
    """One response of three pages. Engine and learner differ most at its end."""
    rollout = parts.trajectory("row/0", 0, 1.0, 0, "word " * 5000)
    response = len(rollout.tokens) - rollout.prompt_length
    assert 2 * PAGE_TOKENS < len(rollout.tokens) < 4 * PAGE_TOKENS
    columns = {"learner_logprobs": torch.full((1, response), -0.75)}
    write_rollouts(run.path / "rollouts" / "step_000002.parquet", 2, [(tiny.prompt("Go on"), rollout)], columns)


@pytest.fixture(scope="module")
def dashboard(runs: Path) -> Iterator[Dashboard]:
    with closing(Dashboard(runs)) as served:
        yield served


def test_a_conversation_shows_calls_results_and_rewards_of_turns(chrome: Any, dashboard: Dashboard) -> None:
    with page_of(chrome, f"{dashboard.url}#/run/tools/rollouts?step=3&sort=tool_calls") as page:
        first = page.locator("table.rollouts tbody tr", has_text="row/1").first
        first.wait_for()
        assert "3 (1 failed)" in first.inner_text()
        first.locator(".row-link").click()
        facts = page.locator("dl.facts")
        facts.wait_for()
        reward = float(facts.locator(".fact", has_text="Reward").first.locator("dd").inner_text())
        page.get_by_role("link", name="Conversation").click()
        said = page.locator(".conversation > li")
        said.first.wait_for()
        roles = [text.lower() for text in page.locator(".conversation .role").all_inner_texts()]
        assert roles == ["user", "assistant", "tool", "assistant"]
        assert parts.TEXT in said.nth(1).inner_text()
        assert "calls add" in said.nth(1).locator(".call").inner_text()
        assert json.loads(said.nth(1).locator(".call pre").inner_text()) == {"a": 1}
        assert said.nth(1).locator(".reward").inner_text() == f"reward +{reward:.3f}"
        assert said.nth(2).locator(".content").inner_text() == "Again!"
        assert said.nth(3).locator(".reward").inner_text() == "reward 0.000"
        assert not serious_findings(page)
        page.get_by_role("link", name="Group side by side").click()
        page.locator(".side-by-side .call").first.wait_for()
        assert page.locator(".side-by-side > li").count() == 4
        assert not serious_findings(page)
        until(page, "document.documentElement.scrollWidth <= 1280")


def test_the_engine_page_draws_all_numbers_of_the_engine(chrome: Any, dashboard: Dashboard) -> None:
    with page_of(chrome, f"{dashboard.url}#/run/tools/engine") as page:
        keys = page.locator("figure.chart .key")
        shows(page, lambda: set(ENGINE) - {text.split("\n")[0] for text in keys.all_inner_texts()}, set())


def test_held_out_curves_are_those_of_sources(chrome: Any, dashboard: Dashboard) -> None:
    with page_of(chrome, f"{dashboard.url}#/run/tools") as page:
        shows(page, lambda: legend(page, "Held-out reward"), ["mean", "a/mean", "b/mean"])
        shows(page, lambda: legend(page, "Held out: other numbers of the scorer"), ["reward/acc/mean"])
        page.goto(f"{dashboard.url}#/run/long")
        seven = ["mean", *(f"{source}/mean" for source in SOURCES[:7])]
        shows(page, lambda: legend(page, "Held-out reward"), seven)
        page.get_by_text("2 more are under Metrics.").wait_for()


def legend(page: Any, title: str) -> list[str]:
    chart = page.locator("figure.chart").filter(has=page.get_by_role("heading", name=title, exact=True))
    chart.wait_for()
    return [text.split("\n")[0] for text in chart.locator(".key").all_inner_texts()]


def test_a_zoom_shows_single_steps(chrome: Any, dashboard: Dashboard) -> None:
    with page_of(chrome, f"{dashboard.url}#/run/long/metrics?keys=reward/mean") as page:
        page.get_by_text("drawn as 1 000 means").wait_for()
        drag(page)
        page.get_by_text("are drawn one by one").wait_for()
        drawn(page)
        page.locator(".plot").focus()
        seen = []
        for _ in range(3):
            page.keyboard.press("ArrowRight")
            drawn(page)
            seen.append(int(re.sub(r"\D", "", page.locator(".where").inner_text())))
            value = page.locator(".legend .value").inner_text()
            assert float(re.sub(r"\s", "", value)) == pytest.approx(seen[-1] / 8, abs=0.5)
        assert [each - seen[0] for each in seen] == [0, 1, 2]
        assert 0.49 * NUM_STEPS < seen[0] < 0.53 * NUM_STEPS
        page.locator(".plot .u-over").dblclick()
        page.get_by_text("drawn as 1 000 means").wait_for()
        page.get_by_label("By time").check()
        drag(page)
        page.get_by_text("are drawn one by one").wait_for()


def drag(page: Any) -> None:
    """Over two hundredths of a chart."""
    drawn(page)
    box = page.locator(".plot .u-over").bounding_box()
    page.mouse.move(box["x"] + 0.50 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.52 * box["width"], box["y"] + 60, steps=5)
    page.mouse.up()


def test_a_timeline_without_a_trace_says_what_is_not_known(chrome: Any, dashboard: Dashboard) -> None:
    with page_of(chrome, f"{dashboard.url}#/run/tools/timeline") as page:
        page.get_by_text("because the run has no trace").wait_for()
        page.get_by_text("Of generate only the length in each step is known, not when it was").wait_for()
        page.get_by_role("row", name=re.compile("^generate")).wait_for()


def test_an_exported_rollout_has_all_its_tokens(chrome: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    with page_of(chrome, f"{dashboard.url}#/run/long/rollouts?step=2") as page:
        page.locator("table.rollouts .row-link").first.click()
        with page.expect_download() as download:
            page.get_by_role("link", name="Export rollout").click()
        file = tmp_path / "rollout.html"
        download.value.save_as(file)
    with page_of(chrome, f"{file.as_uri()}#/", offline=True) as page:
        page.locator(".token-field .tok").first.wait_for()
        page.get_by_role("button", name="Next", exact=True).click()
        until(page, f"document.querySelector('.token-field .tok')?.dataset.at === '{PAGE_TOKENS}'")
        page.keyboard.press("m")
        until(page, f"Number(document.querySelector('.tok.is-chosen')?.dataset.at) > {2 * PAGE_TOKENS}")
        assert page.get_by_role("note").inner_text(), "it says what is in the file"
        assert not serious_findings(page)


LOADED = """count => [...document.querySelectorAll('.picture img')].filter(
    image => image.complete && image.naturalWidth === 12).length === count"""
"""The images of ``save_pictures`` are 12 pixels wide."""


def test_images_are_shown_beside_their_tokens(chrome: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    with page_of(chrome, f"{dashboard.url}#/run/pictures/rollouts?step=2") as page:
        page.locator("table.rollouts .row-link").first.click()
        check_pictures(page)
        with page.expect_download() as download:
            page.get_by_role("link", name="Export rollout").click()
        file = tmp_path / "rollout.html"
        download.value.save_as(file)
        page.get_by_role("link", name="Conversation").click()
        page.locator(".conversation").wait_for()
        until(page, LOADED, 4)  # an image of the prompt, and an image and the two frames of a video of a tool
        said = page.locator(".conversation > li")
        assert "<b>What</b> is it?" in said.first.inner_text()
        assert said.nth(2).locator(".frames img").count() == 2
        assert not serious_findings(page)
        page.get_by_role("link", name="Group side by side").click()
        page.locator(".panel.prompt .picture img").wait_for()
        assert not serious_findings(page)
    with page_of(chrome, f"{file.as_uri()}#/", offline=True) as page:
        check_pictures(page)


def check_pictures(page: Any) -> None:
    """The tokens of an image are one chip, which opens and is passed in one step of the keyboard."""
    chips = page.locator(".media-chip")
    chips.first.wait_for()
    assert chips.locator("button.quiet").all_inner_texts() == [
        "image 1 · 3 tokens ▸", "image 2 · 1 token ▸", "image 2 · 2 tokens ▸", "video · 2 tokens ▸"]  # fmt: skip
    until(page, LOADED, 4)
    field = page.locator(".token-field")
    places = "[...document.querySelectorAll('.token-field .tok')].map(each => Number(each.dataset.at))"
    assert page.evaluate(places)[:2] == [0, 4], "tokens 1 to 3 stand for the image"
    field.focus()
    page.keyboard.press("Home")
    until(page, "document.querySelector('.is-chosen')?.dataset.at === '0'")
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('.media-chip.is-chosen')?.dataset.at === '1'")
    side = page.locator(".token-media")
    assert "Stands for image 1: token 1 of 3" in side.inner_text()
    assert side.locator("img").count() == 1
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('.tok.is-chosen')?.dataset.at === '4'")
    page.keyboard.press("ArrowLeft")
    until(page, "document.querySelector('.media-chip.is-chosen')?.dataset.at === '1'")
    chips.first.locator("button.quiet").click()
    until(page, f"({places}).slice(0, 5).join() === '0,1,2,3,4'")
    chips.first.locator("button.quiet").click()
    until(page, f"({places}).slice(0, 2).join() === '0,4'")
    assert not serious_findings(page)


def test_a_hidden_page_holds_no_connection(chrome: Any, dashboard: Dashboard, runs: Path) -> None:
    hide = """isHidden => {
        Object.defineProperty(document, 'hidden', {value: isHidden, configurable: true});
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    run = parts.make_run(runs, "hidden")
    with page_of(chrome, f"{dashboard.url}#/run/{run.path.name}/metrics") as page:
        page.locator("label.metric", has_text="reward/mean").first.wait_for()
        page.get_by_text("live", exact=True).wait_for()
        page.evaluate(hide, True)
        page.get_by_text("paused", exact=True).wait_for()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        parts.add_metrics(run, 4, **{"reward/mean": 0.777})
        page.wait_for_timeout(2500)
        assert not asked, "nothing is asked for while nobody looks"
        page.evaluate(hide, False)
        page.get_by_text("live", exact=True).wait_for()
        page.locator("label.metric", has_text="reward/mean").filter(has_text="0.777").wait_for()


def test_a_running_server_is_shown(chrome: Any, runs: Path) -> None:
    server = Running().start()
    try:
        server.ready()
        body = json.dumps({"text": "12+34=", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{server.url}/generate", body), timeout=300) as reply:
            assert reply.status == 200
        with closing(Dashboard(runs, "--server", server.url)) as served, page_of(chrome, served.url) as page:
            page.get_by_role("link", name="Servers").click()
            panel = page.locator("section.panel", has_text=server.url)
            panel.get_by_text("alive").wait_for()
            settled(page)
            facts = dict(zip(panel.locator("dt").all_inner_texts(), panel.locator("dd").all_inner_texts(), strict=True))
            assert (facts["Running"], facts["Waiting"], facts["Version"]) == ("0", "0", "0")
            assert facts["KV cache"].strip().endswith("%")
            assert "tiny:qwen3" in panel.inner_text()
            assert not serious_findings(page)
            page.set_viewport_size({"width": 375, "height": 860})
            until(page, "document.documentElement.scrollWidth <= 375")
            server.kill()
            panel.get_by_text("no answer").wait_for()
            assert not serious_findings(page)
    finally:
        server.kill()
