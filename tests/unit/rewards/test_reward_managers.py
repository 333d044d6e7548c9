"""Batches, mixtures, shares of failures, and a judge on a real server that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest
import tiny
from aiohttp import web
from patience import long_enough
from workflows.episodes import END, encode
from workflows.scripted_engine import ScriptedEngine

from headwater.config.load import load_config
from headwater.config.schema import RewardConfig, SandboxConfig
from headwater.core.errors import ConfigError, RewardFailed, RewardsUnreliable
from headwater.core.protocols import EpisodeInput
from headwater.core.records import Answer, Score
from headwater.core.requests import SamplingParams
from headwater.observe.spans import Spans
from headwater.rewards.managers.batch import BatchRewardManager
from headwater.rewards.managers.naive import NaiveRewardManager
from headwater.rewards.scoring import FAILURE_WINDOW
from headwater.workflows import Episode, WorkflowContext
from headwater.workflows.multi_turn import MultiTurnWorkflow

FUNCTIONS = """
def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0, **kwargs):
    assert len(data_sources) == len(extra_infos) == len(solution_strs) and not kwargs
    return [
        {"score": float(text == truth) + bonus, "size": len(solution_strs)}
        for text, truth in zip(solution_strs, ground_truths)
    ]

def trl_batch(prompts, completions, level, **columns):
    return [each + len(prompts) / 100 for each in level]

def short(solution_strs):
    return [1.0] * (len(solution_strs) - 1)

def length(solution_str): return {"score": len(solution_str), "letters": 2}

def sometimes(solution_str):
    return 1.0 if solution_str == "good" else {}["missing"]
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("managers") / "functions.py"
    file.write_text(FUNCTIONS)
    return file


async def score_all(manager, texts, **fields):
    answers = [Answer(tiny.prompt(uid=f"row{number}", **fields), text) for number, text in enumerate(texts)]
    return await asyncio.gather(*(manager.score(each) for each in answers), return_exceptions=True)


def batch_of(functions, name, **settings):
    config = RewardConfig(manager="batch", function=f"{functions}:{name}", **{"workers": 1, **settings})
    return closing(BatchRewardManager(config, Spans()))


def test_one_call_scores_many_responses(functions):
    with batch_of(functions, "verl_batch", batch_size=4, function_args={"bonus": 0.5}) as manager:
        made = asyncio.run(score_all(manager, ["46", "47"] * 3))
    assert [each.value for each in made] == [1.5, 0.5] * 3
    assert [each.info["size"] for each in made] == [4, 4, 4, 4, 2, 2]
    with batch_of(functions, "trl_batch") as manager:
        made = asyncio.run(score_all(manager, ["a", "b"], columns={"level": 3}))
    assert made == [Score(3.02), Score(3.02)]
    with batch_of(functions, "short") as manager:
        made = asyncio.run(score_all(manager, ["a", "b"]))
        assert manager.take_counts()["reward/failures/bad_value"] == 1
    assert all("returned 1 values for 2 responses; return as many" in str(each) for each in made)
    assert "row row0 and 1 others" in str(made[0])


def test_a_batch_needs_a_function_of_lists(functions):
    with batch_of(functions, "length") as manager, pytest.raises(RewardFailed, match="name a function of lists"):
        manager.check_row(tiny.prompt())


def test_a_mixture_is_a_weighted_sum_with_its_parts(functions):
    parts = {
        "right": {"weight": 2},
        "length": {"function": f"{functions}:length", "weight": -0.1},
        "marked": {"function": "gsm8k", "weight": 1.0, "args": {"method": "flexible"}},
    }
    with closing(NaiveRewardManager(RewardConfig(functions=parts, workers=1), Spans())) as manager:
        (made,) = asyncio.run(score_all(manager, ["46"]))
        assert not manager.reads_column("level")
        assert asyncio.run(score_all(manager, ["x"], ground_truth="no number"))[0].cause == "raised"
    assert made.value == pytest.approx(2 * 1.0 - 0.1 * 2 + 1.0)
    assert made.info == {
        "right": 1.0, "length": 2.0, "length_letters": 2, "marked": 1.0, "reward_parts": [1.0, 2.0, 1.0]
    }  # fmt: skip


def test_too_many_failures_stop_the_run(functions):
    config = RewardConfig(function=f"{functions}:sometimes", workers=1, max_failed_share=0.25)
    with closing(NaiveRewardManager(config, Spans())) as manager:
        few = asyncio.run(score_all(manager, ["good", "good", "good", "bad"] * (FAILURE_WINDOW // 4)))
        assert {type(each) for each in few} == {Score, RewardFailed}
        many = asyncio.run(score_all(manager, ["bad"] * 8))
    assert type(many[-1]) is RewardsUnreliable
    assert "70 of the last 256 scoring calls failed, and reward.max_failed_share = 0.25 allows 64 of 256" in str(
        many[-1]
    )
    assert "the most frequent cause is raised" in str(many[-1])
    assert "functions.py:" in str(many[-1])


def test_a_run_stops_as_soon_as_the_failures_are_conclusive(functions):
    def first_stop(max_failed_share, texts):
        config = RewardConfig(function=f"{functions}:sometimes", workers=1, max_failed_share=max_failed_share)
        with closing(NaiveRewardManager(config, Spans())) as manager:
            made = asyncio.run(score_all(manager, texts))
        return next((place for place, each in enumerate(made, 1) if type(each) is RewardsUnreliable), None)

    assert first_stop(0.5, ["bad"] * 40) == 32  # none has worked
    assert first_stop(0.5, ["good", *["bad"] * 140]) == 130  # too many, whatever the rest of the window brings
    assert first_stop(0.0, ["good"] * 40 + ["bad"]) == 41
    assert first_stop(1.0, ["bad"] * 300) is None


def test_settings_that_clash_are_refused(tmp_path):
    (tmp_path / "f.py").write_text("def compute_score(solution_str): return 1.0\n")

    def problems(*overrides):
        with pytest.raises(ConfigError) as error:
            load_config("quickstart", overrides)
        return str(error.value)

    assert "scores one response per call; use batch" in problems("reward.batch_size=4")
    assert "reward.overlong_tokens = 0 turns off" in problems("reward.manager=dapo")
    assert "use processes" in problems("reward.manager=prime", "reward.where=threads")
    assert "calls plain functions one after the other" in problems("reward.where=event_loop", "reward.workers=2")
    assert "remove one of the two" in problems("reward.function=gsm8k", "reward.functions.a.weight=1")
    assert "no such key; did you mean 'weight'" in problems("reward.functions.a.wieght=1")
    assert "must be a finite number" in problems("reward.functions.a.weight=much")
    for name in ("prime", "naive", "batch"):
        load_config("quickstart", [f"reward.manager={name}"])
    load_config("quickstart", ["reward.manager=dapo", "reward.overlong_tokens=1"])
    loaded = load_config("quickstart", [f"reward.functions.a.function={tmp_path}/f.py:compute_score"]).config
    assert loaded.reward.functions["a"]["function"] == f"{tmp_path}/f.py:compute_score"


def test_scorers_that_run_code_receive_the_sandbox_of_the_run():
    settings = SandboxConfig(memory_mib=99)
    with closing(NaiveRewardManager(RewardConfig(function="code"), Spans(), sandbox=settings)) as manager:
        assert manager._parts[0].function.settings["sandbox"] is settings
        assert not manager.reads_column("sandbox")


class Judge:
    """A server with OpenAI's chat API that misbehaves as each response asks for."""

    def __init__(self) -> None:
        self.num_requests: dict[str, int] = {}
        self.keys: set[str] = set()
        self.questions: list[str] = []
        self.most_at_once = self._num_open = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self._num_open += 1
        self.most_at_once = max(self.most_at_once, self._num_open)
        try:
            return await self._answer(request)
        finally:
            self._num_open -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.keys.add(request.headers.get("Authorization", ""))
        question, _, asked = (await request.json())["messages"][0]["content"].rpartition(" Grade: ")
        self.questions.append(question)
        count = self.num_requests[asked] = self.num_requests.get(asked, 0) + 1
        if asked.startswith("busy") and count < 3:
            return web.Response(status=429 if count == 1 else 503, headers={"Retry-After": "0"})
        if asked == "refused":
            return web.Response(status=401, text="wrong key")
        if asked == "down":
            return web.Response(status=500, text="no GPU")
        if asked == "slow":
            await asyncio.sleep(3600)
        if asked == "closes":
            request.transport.close()
        if asked == "empty":
            usage = {"prompt_tokens": 500, "completion_tokens": 0}
            return web.json_response({"choices": [{"message": {"content": None}}], "usage": usage})
        if asked == "html":
            return web.Response(text="<html>hello</html>")
        text = {"nonsense": "I like it", "json": 'Well: {"score": 5, "why": "x"}', "high": "Score: 11"}.get(
            asked, "Score: 1. No: Score: 7.5"
        )
        await asyncio.sleep(0.02)
        usage = {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010}
        return web.json_response({"choices": [{"message": {"content": text}}], "usage": usage})


@asynccontextmanager
async def served(judge: Judge) -> AsyncIterator[str]:
    """The address of a server that answers as ``judge``."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def test_a_judge_reads_the_question_of_the_row_and_is_paid_for_every_turn():
    judge = Judge()

    async def run():
        async with served(judge) as url:
            args = {"base_url": url, "model": "m", "prompt": "{question} Grade: {response}", "price_in": 2.0}
            config = RewardConfig(functions={"quality": {"function": "llm_judge", "args": args}}, workers=1)
            with closing(NaiveRewardManager(config, Spans())) as manager:
                context = WorkflowContext(tiny.tokenizer(), manager, SamplingParams(max_new_tokens=200))
                engine = ScriptedEngine([(*encode("45"), END)] * 3, END)
                episode = Episode(context, engine, EpisodeInput(tiny.prompt(), sample=0, rng_key=0))
                return await MultiTurnWorkflow(context).run(episode)

    trajectory = asyncio.run(run())
    assert judge.questions == ["12+34="] * 3
    assert trajectory.info["quality"] == 0.75  # of the last answer
    assert trajectory.reward_info["quality_judge_prompt_tokens"] == 3000
    assert trajectory.reward_info["quality_judge_cost"] == pytest.approx(0.006)


def test_a_judge_is_retried_counted_and_never_believed_blindly(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    long_enough(_check_judge, 1.5, 20.0)


def _check_judge(limit_s: float) -> None:
    judge = Judge()

    async def run():
        async with served(judge) as url:
            return await score_by(url)

    async def score_by(url: str):
        common = {"base_url": url, "model": "m", "prompt": "{question} Grade: {response}", "api_key_env": "JUDGE_KEY"}
        args = {**common, "price_in": 2.0, "price_out": 10.0, "timeout_s": limit_s, "max_attempts": 3}
        timeout_s = 10 * limit_s  # longer than all attempts
        config = RewardConfig(function="llm_judge", function_args=args, max_concurrent=8, timeout_s=timeout_s)
        with closing(NaiveRewardManager(config, Spans())) as manager:
            texts = [
                "busy",
                "refused",
                "down",
                "slow",
                "closes",
                "html",
                "nonsense",
                "high",
                "empty",
                *["good"] * 20,
            ]
            made = await score_all(manager, texts)
            counts = manager.take_counts()
        by_key = RewardConfig(function="llm_judge", function_args={**args, "score_key": "score"})
        with closing(NaiveRewardManager(by_key, Spans())) as manager:
            (from_json,) = await score_all(manager, ["json"])
        return dict(zip(texts, made, strict=True)), counts, from_json

    made, counts, from_json = asyncio.run(run())
    good = {"judge_prompt_tokens": 1000, "judge_completion_tokens": 10, "judge_cost": 0.0021, "judge_retries": 0}
    assert made["good"] == Score(0.75, good)
    assert made["busy"].value == 0.75
    assert made["busy"].info["judge_retries"] == 2
    assert from_json.value == 0.5
    assert "answered 401: wrong key" in str(made["refused"])
    assert judge.num_requests["refused"] == 1
    assert "in 3 attempts; it answered 500: no GPU" in str(made["down"])
    assert judge.num_requests["down"] == 3
    assert f"no answer within timeout_s = {limit_s:g} s" in str(made["slow"])
    assert made["closes"].cause == "judge_unavailable"
    assert "did not answer with a chat completion" in str(made["html"])
    assert "no score (score_pattern" in str(made["nonsense"])
    assert "I like it" in str(made["nonsense"])
    assert "the judge gave 11, which is not between" in str(made["high"])
    assert counts["reward/failures/judge_unavailable"] == 4
    assert counts["reward/failures/judge_nonsense"] == 4
    assert counts["reward/spent_on_failures/judge_prompt_tokens"] == 2500  # nonsense, high and empty
    assert counts["reward/spent_on_failures/judge_cost"] == pytest.approx(0.0052)
    assert judge.keys == {"Bearer secret"}
    assert 2 < judge.most_at_once <= 8


def test_a_judge_without_its_settings_is_refused_before_the_run():
    manager = NaiveRewardManager(RewardConfig(function="llm_judge", function_args={"model": "m"}), Spans())
    with pytest.raises(RewardFailed, match=r"its parameter 'base_url'.*reward\.function_args\.base_url"):
        manager.check_row(tiny.prompt())
    for wrong, reason in (
        ({"max_attempts": 0}, "max_attempts = 0: must be >= 1"),
        ({"lowest": 5, "highest": 5}, "highest = 5: must be > lowest = 5"),
        ({"lowest": 10}, "lowest = 10: must be < highest = 10.0"),
    ):
        with pytest.raises(RewardFailed, match=reason):
            NaiveRewardManager(RewardConfig(function="llm_judge", function_args=wrong), Spans())
