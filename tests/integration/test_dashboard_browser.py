"""The dashboard in a real Chromium, over real runs."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from broken_runs import MILLION, SCRIPT, make_damaged, make_hostile, make_huge
from browsing import LIMIT_S, Dashboard, browser, drawn, names_of, page_of, serious_findings, settled, shows, until
from command import CUT_DOWN, headwater, start_headwater
from held import waits_for

from headwater.cli.ui import redirect

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dashboard_browser")]

PAGE_TOKENS = 4096


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, chrome: Any) -> Path:
    """A folder with two real runs, one with a script in its texts, one with a huge rollout, and a damaged one."""
    folder = tmp_path_factory.mktemp("dashboard") / "runs"
    common = [*CUT_DOWN, "trainer.total_steps=3", "trainer.save_learner_logprobs=true", "trainer.trace=true",
              "eval.every_steps=2", f"run.root={folder}"]  # fmt: skip
    for name, rate in (("first", "1e-3"), ("second", "2e-3")):
        trained = headwater("train", "quickstart", *common, f"run.name={name}", f"learner.learning_rate={rate}")
        assert trained.code == 0, trained.stderr
    for name in ("hostile", "huge", "damaged"):
        shutil.copytree(folder / "first", folder / name)
    make_hostile(folder / "hostile")
    make_huge(folder / "huge")
    make_damaged(folder / "damaged")
    return folder


@pytest.fixture(scope="module")
def dashboard(runs: Path) -> Iterator[Dashboard]:
    served = Dashboard(runs)
    yield served
    served.close()


def rows_of(file: Path) -> list[dict[str, Any]]:
    return pq.read_table(file).to_pylist()


def test_runs_are_listed_searched_and_compared(chrome: Any, dashboard: Dashboard) -> None:
    with page_of(chrome, dashboard.url) as page:
        assert names_of(page) == {"first", "second", "hostile", "huge", "damaged"}
        page.get_by_label("Search runs").fill("sec")
        until(page, "document.querySelectorAll('table.runs tbody tr').length === 1")
        assert names_of(page) == {"second"}
        page.get_by_label("Search runs").fill("no such run")
        page.get_by_text("No run matches").wait_for()
        page.get_by_label("Search runs").fill("")
        page.get_by_label("Compare first").check()
        page.get_by_label("Compare second").check()
        page.get_by_role("link", name="Compare 2").click()
        page.get_by_role("heading", name="Compare 2 runs").wait_for()
        curves = page.locator("figure.chart", has_text="reward/mean").first
        curves.wait_for()
        assert curves.locator(".legend .key").all_inner_texts()[0].startswith("first")
        difference = page.locator("table.diff tbody tr", has_text="learner.learning_rate")
        difference.wait_for()
        assert "0.001" in difference.inner_text()
        assert "0.002" in difference.inner_text()


def test_a_run_shows_its_numbers(chrome: Any, dashboard: Dashboard, runs: Path) -> None:
    records = [json.loads(line) for line in (runs / "first" / "metrics.jsonl").read_text().splitlines()]
    last = [each for each in records if each["kind"] == "train"][-1]
    with page_of(chrome, f"{dashboard.url}#/run/first") as page:
        page.locator("figure.chart", has_text="Entropy").wait_for()
        reward = page.locator("dl.facts .fact", has_text="Reward").first.locator("dd")
        shows(page, reward.inner_text, f"{last['reward/mean']:.3f}")
        page.get_by_text("✓ adds up").wait_for()
        assert "12 dispatched = 12 trained" in page.locator(".adds-up").inner_text()
        for title in ("Reward", "Held-out reward", "Time by stage", "Staleness", "Throughput", "Memory"):
            page.get_by_role("heading", name=title, exact=True).wait_for()
        page.get_by_role("link", name="Metrics", exact=True).click()
        page.get_by_label("Search metrics and explanations").fill("grad_norm")
        page.locator("label.metric", has_text="actor/grad_norm").locator("input").check()
        chart = page.locator("figure.chart", has_text="actor/grad_norm")
        chart.wait_for()
        chart.locator(".plot").focus()
        page.keyboard.press("ArrowLeft")
        until(page, "[...document.querySelectorAll('.where')].some(each => each.textContent === 'step 2')")
        page.get_by_label("Log scale").check()
        page.get_by_label("By time").check()
        page.get_by_role("link", name="Timeline", exact=True).click()
        page.get_by_role("row", name=re.compile("^generate")).wait_for()
        page.get_by_role("button", name="Whole run").click()
        page.get_by_role("button", name="Zoom in").click()
        page.get_by_role("link", name="Engine", exact=True).click()
        page.get_by_text("The run is not running").wait_for()
        page.get_by_role("link", name="Config", exact=True).click()
        page.get_by_label("Search settings and explanations").fill("learner.learning_rate")
        setting = page.locator(".settings dl > div", has_text="learner.learning_rate")
        setting.first.wait_for()
        assert "0.001" in setting.first.inner_text()


def test_rollouts_are_filtered_and_grouped(chrome: Any, dashboard: Dashboard, runs: Path) -> None:
    rows = rows_of(runs / "first" / "rollouts" / "step_000003.parquet")
    most = max(row["reward"] for row in rows)
    with page_of(chrome, f"{dashboard.url}#/run/first/rollouts") as page:
        body = page.locator("table.rollouts tbody tr")
        body.first.wait_for()
        assert body.count() == len(rows) == 8
        page.get_by_label("Reward from").fill(str(most))
        page.keyboard.press("Enter")
        wanted = sum(row["reward"] >= most for row in rows)
        assert wanted < 8, "the filter has something to leave out"
        until(page, f"document.querySelectorAll('table.rollouts tbody tr').length === {wanted}")
        page.get_by_label("Reward from").fill("1000")
        page.keyboard.press("Enter")
        page.get_by_text("No rollout matches the filters.").wait_for()
        page.get_by_role("button", name="Remove the filters").click()
        page.get_by_label("Sort by").select_option("length")
        until(page, "document.querySelectorAll('table.rollouts tbody tr').length === 8")
        page.get_by_label("All 3 steps").check()
        page.get_by_text("of 24", exact=False).first.wait_for()
        page.get_by_label("Show").select_option("groups")
        # Groups are those of one step, and the controls say which.
        page.get_by_role("columnheader", name="Rewards of the samples").wait_for()
        assert page.get_by_label("All 3 steps").is_disabled()
        assert not page.get_by_label("All 3 steps").is_checked()
        assert page.get_by_label("Step", exact=True).input_value() == "3"
        page.locator("table.rollouts tbody .row-link").first.click()
        page.locator(".side-by-side > li").first.wait_for()
        assert page.locator(".side-by-side > li").count() == 2
        page.get_by_role("link", name="This prompt over steps").click()
        page.get_by_role("heading", name=re.compile("^Prompt")).wait_for()
        page.locator("table.rollouts tbody tr").first.wait_for()


def test_the_values_of_a_token_are_those_of_the_file(chrome: Any, dashboard: Dashboard, runs: Path) -> None:
    rows = rows_of(runs / "first" / "rollouts" / "step_000003.parquet")
    with page_of(chrome, f"{dashboard.url}#/run/first/rollouts?step=3&sort=length") as page:
        link = page.locator("table.rollouts tbody tr").first
        link.wait_for()
        uid = link.locator(".sub").inner_text()
        sample = int(link.locator("td.num").first.inner_text())
        row = next(each for each in rows if each["uid"] == uid and each["sample"] == sample)
        link.locator(".row-link").click()
        page.locator(".token-field").focus()
        page.keyboard.press("Home")
        places = [0, row["prompt_length"], len(row["tokens"]) - 1]
        for place in places:
            page.goto(re.sub(r"&at=\d+", "", page.url) + f"&at={place}")
            until(
                page,
                "place => document.querySelector('[data-value=token-place]')?.textContent.startsWith(place)",
                arg=f"{place + 1} of",
            )
            values = {name: page.locator(f"[data-value={name}]").inner_text() for name in (
                "token-id", "token-mask", "token-version", "token-logprob", "token-learner", "token-difference",
                "token-advantages", "token-entropies", "token-bytes")}  # fmt: skip
            assert values["token-id"] == str(row["tokens"][place])
            assert values["token-mask"] == ("yes" if row["loss_mask"][place] else "no")
            assert re.fullmatch("[0-9a-f]{2}( [0-9a-f]{2})*", values["token-bytes"]), values["token-bytes"]
            if place < row["prompt_length"]:
                assert values["token-logprob"] == "–"
                continue
            assert values["token-version"] == str(row["versions"][place])
            for name, column in (("token-logprob", "logprobs"), ("token-learner", "learner_logprobs"),
                                 ("token-advantages", "advantages"), ("token-entropies", "entropies")):  # fmt: skip
                assert values[name].replace("−", "-").lstrip("+") == shown(row[column][place]), name
            difference = row["learner_logprobs"][place] - row["logprobs"][place]
            assert read(values["token-difference"]) == pytest.approx(difference, abs=6e-7)
        # Hovering shows another token without choosing it.
        page.locator(".tok[data-at='0']").hover()
        until(page, "document.querySelector('[data-value=token-place]').textContent.startsWith('1 of')")


def shown(value: float) -> str:
    """A value as the page writes it: six decimals, or two digits if that would be zero."""
    if value != 0 and abs(value) < 5e-7:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits}e{int(power)}"
    return f"{value + 0.0:.6f}"


def read(text: str) -> float:
    return float(text.replace("−", "-").replace("+", ""))


def test_everything_can_be_done_with_the_keyboard(chrome: Any, dashboard: Dashboard) -> None:
    with page_of(chrome, f"{dashboard.url}?#/?search=first") as page:
        page.locator("table.runs tbody tr").first.wait_for()
        drawn(page)
        page.keyboard.press("?")
        page.get_by_role("dialog").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="detached")
        drawn(page)
        page.keyboard.press("j")
        until(page, "getComputedStyle(document.activeElement).outlineStyle === 'solid'")  # the focus is visible
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="first").wait_for()
        drawn(page)
        page.keyboard.press("3")
        page.locator("table.rollouts tbody tr").first.wait_for()
        drawn(page)
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.locator(".token-field .tok.is-chosen").wait_for()
        drawn(page)
        before = page.locator("[data-value=token-place]").inner_text()
        page.locator(".token-field").focus()
        page.keyboard.press("ArrowRight")
        until(page, "before => document.querySelector('[data-value=token-place]').textContent !== before", arg=before)
        colour = page.get_by_label("Colour by").input_value()
        page.keyboard.press("c")
        until(page, "colour => document.querySelector('.token-view select').value !== colour", arg=colour)
        drawn(page)
        page.keyboard.press("m")
        until(page, "location.hash.includes('at=')")
        drawn(page)
        url = page.url
        page.keyboard.press("]")
        until(page, "url => location.href !== url", arg=url)
        page.locator(".token-field .tok.is-chosen").wait_for()
        drawn(page)
        page.keyboard.press("g")
        page.locator(".side-by-side > li").first.wait_for()
        drawn(page)
        page.keyboard.press("d")
        until(page, "document.documentElement.dataset.theme === 'light'")
        page.keyboard.press("d")
        until(page, "document.documentElement.dataset.theme === 'dark'")


PAGES = ("", "run/first", "run/first/metrics", "run/first/rollouts", "run/first/rollouts?show=groups",
         "run/first/timeline", "run/first/engine", "run/first/config", "compare?runs=first,second")  # fmt: skip
LINKED = {"ROLLOUT": "table.rollouts .row-link", "GROUP": "main a:text('Group side by side')",
          "PROMPT": "main a:text('This prompt over steps')"}  # fmt: skip
"""Pages whose addresses contain a rollout or a prompt: links to them, each on the page before."""


def open_every_page(page: Any, url: str) -> Iterator[str]:
    for name in PAGES:
        page.goto(f"{url}#/{name}")
        settled(page)
        yield name
    page.goto(f"{url}#/run/first/rollouts")
    for name, link in LINKED.items():
        page.locator(link).first.click()
        until(page, "name => location.hash.includes(`/${name}?`)", arg=name.lower())
        settled(page)
        yield name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(chrome: Any, dashboard: Dashboard, scheme: str) -> None:
    with page_of(chrome, dashboard.url, scheme=scheme) as page:
        for name in open_every_page(page, dashboard.url):
            found = serious_findings(page)
            assert not found, f"{name}: {found}"
            if name == "ROLLOUT":
                for option in page.locator(".token-view select option").all():
                    page.get_by_label("Colour by").select_option(option.get_attribute("value"))
                    found = serious_findings(page, ".token-view")
                    assert not found, f"{option.inner_text()}: {found}"
        page.keyboard.press("?")
        page.get_by_role("dialog").wait_for()
        assert not serious_findings(page)


def test_pages_fit_a_phone(chrome: Any, dashboard: Dashboard) -> None:
    with page_of(chrome, dashboard.url, width=375) as page:
        for _ in open_every_page(page, dashboard.url):
            # The timeline is drawn again once it knows its width.
            until(page, "document.documentElement.scrollWidth <= 375")


def test_script_in_texts_is_shown_and_not_run(chrome: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    with page_of(chrome, f"{dashboard.url}#/run/hostile") as page:
        page.get_by_text("window.wasRun = 1").first.wait_for()
        page.goto(f"{dashboard.url}#/run/hostile/rollouts?step=3")
        page.get_by_text("window.wasRun = 1").first.wait_for()
        link = page.locator("table.rollouts .row-link").first.get_attribute("href")
        page.goto(f"{dashboard.url}{link}&view=conversation")
        assert SCRIPT in page.locator(".conversation").inner_text()
        with page.expect_download() as download:
            page.get_by_role("link", name="Export rollout").click()
        assert page.evaluate("window.wasRun") is None
        file = tmp_path / "rollout.html"
        download.value.save_as(file)
        with page_of(chrome, f"{file.as_uri()}#/", offline=True) as exported:
            exported.get_by_role("link", name="Conversation").click()
            assert SCRIPT in exported.locator(".conversation").inner_text()
            assert exported.evaluate("window.wasRun") is None


def test_a_rollout_of_a_million_tokens_is_paged(chrome: Any, dashboard: Dashboard) -> None:
    with page_of(chrome, f"{dashboard.url}#/run/huge/rollouts?step=3") as page:
        page.locator("table.rollouts .row-link").first.click()
        page.locator(".token-field .tok").first.wait_for()
        assert page.locator(".token-field .tok").count() == PAGE_TOKENS
        page.get_by_role("button", name="Next", exact=True).click()
        until(page, f"document.querySelector('.token-field .tok')?.dataset.at === '{PAGE_TOKENS}'")
        page.goto(f"{page.url.split('&')[0]}&at={MILLION}")
        until(page, f"document.querySelector('.tok.is-chosen')?.dataset.at === '{MILLION}'")
        assert page.locator(".token-field .tok").count() <= PAGE_TOKENS


def test_a_half_written_run_is_explained(chrome: Any, dashboard: Dashboard) -> None:
    with page_of(chrome, f"{dashboard.url}#/run/damaged") as page:
        page.get_by_role("heading", name="damaged").wait_for()
        until(page, "!document.querySelector('main .state.loading')")
        for tab in ("metrics", "rollouts?step=3", "timeline", "engine", "config"):
            page.goto(f"{dashboard.url}#/run/damaged/{tab}")
            until(page, "!document.querySelector('main .state.loading')")
            assert len(page.locator("main").inner_text()) > 60, tab
        page.goto(f"{dashboard.url}#/run/damaged/rollouts?step=3")
        page.get_by_text("step_000003.parquet").first.wait_for()
        page.goto(f"{dashboard.url}#/run/no-such-run")
        page.get_by_role("heading", name="This run is not there").wait_for()
        page.goto(f"{dashboard.url}#/nowhere")
        page.get_by_text("There is no page at this address.").wait_for()


def test_a_run_is_deleted_while_it_is_open(chrome: Any, dashboard: Dashboard, runs: Path) -> None:
    shutil.rmtree(runs / "doomed", ignore_errors=True)  # of a first attempt
    shutil.copytree(runs / "first", runs / "doomed")
    with page_of(chrome, dashboard.url) as page:
        page.get_by_role("link", name="doomed").click()
        page.locator("figure.chart").first.wait_for()
        shutil.rmtree(runs / "doomed")
        page.get_by_role("heading", name="This run is not there").first.wait_for()
        page.get_by_role("link", name="All runs").first.click()
        page.get_by_role("link", name="doomed").wait_for(state="detached")
        assert "doomed" not in names_of(page)


def test_an_export_needs_no_server(chrome: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    with page_of(chrome, f"{dashboard.url}#/run/first") as page:
        page.locator("figure.chart").first.wait_for()
        reward = page.locator("dl.facts dd").first.inner_text()
        with page.expect_download() as download:
            page.get_by_role("link", name="Export", exact=True).click()
        file = tmp_path / "first.html"
        download.value.save_as(file)
    with page_of(chrome, f"{file.as_uri()}#/", offline=True) as page:
        page.get_by_role("heading", name="first").wait_for()
        shows(page, page.locator("dl.facts dd").first.inner_text, reward)
        page.locator("figure.chart").first.wait_for()
        page.get_by_text("✓ adds up").wait_for()
        for tab in ("Metrics", "Timeline", "Engine", "Config"):
            page.get_by_role("link", name=tab, exact=True).click()
            until(page, "!document.querySelector('main .state.loading, main .state.failed')")
        page.get_by_role("link", name="Rollouts", exact=True).click()
        page.locator("table.rollouts .row-link").first.click()
        page.locator(".token-field .tok.is-chosen").wait_for()
        assert read(page.locator("[data-value=token-logprob]").inner_text()) < 0
        assert not serious_findings(page)


def test_a_live_run_is_followed(chrome: Any, dashboard: Dashboard, runs: Path, tmp_path: Path) -> None:
    name = f"living-{uuid.uuid4().hex[:8]}"
    with page_of(chrome, dashboard.url) as page:
        names_of(page)
        go = tmp_path / "go"
        training = start_headwater("train", "quickstart", *CUT_DOWN, "trainer.total_steps=25", f"run.root={runs}",
                                   f"run.name={name}", *waits_for(go, runs / name, 2))  # fmt: skip
        try:
            page.get_by_role("link", name=name).click()
            page.get_by_text("running").first.wait_for()
            steps = "Number(document.querySelector('.title .steps')?.textContent.match(/step (\\d+)/)?.[1] ?? 0)"
            until(page, f"{steps} >= 1")
            seen = page.evaluate(steps)
            page.locator("figure.chart", has_text="Entropy").wait_for()
            page.get_by_role("link", name="Engine", exact=True).click()
            page.get_by_text("As the run wrote it").wait_for()
            page.get_by_role("heading", name="Requests", exact=True).wait_for()
            page.get_by_role("link", name="Overview", exact=True).click()
            go.touch()
            until(page, f"{steps} > {seen}")
            page.get_by_text("finished").first.wait_for()
            until(page, f"{steps} === 25")
            page.get_by_text("100 dispatched = 100 trained").wait_for()
            assert page.evaluate("performance.getEntriesByType('navigation')[0].type") == "navigate", "no reload"
            training.communicate(timeout=LIMIT_S)
            assert training.returncode == 0
        finally:
            training.kill()


def test_a_token_keeps_others_out(chrome: Any, runs: Path, tmp_path: Path) -> None:
    guarded = Dashboard(runs, "--token", "auto")
    address, token = guarded.url.split("?token=")
    try:
        with page_of(chrome, guarded.url) as page:
            assert "first" in names_of(page)
            assert token not in page.url
        with page_of(chrome, address) as page:
            assert "token" in page.locator("body").inner_text()
        # The file that a browser is started with, so that the token is not among its arguments.
        context = chrome.new_context()
        context.set_default_timeout(LIMIT_S * 1000)
        page = context.new_page()
        page.goto(redirect(guarded.url, str(tmp_path)))
        page.wait_for_url(f"{address}**")
        assert "first" in names_of(page)
        context.close()
    finally:
        guarded.close()
