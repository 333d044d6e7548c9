"""The naive manager: any function, any result, and no invented numbers."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
from patience import long_enough
from PIL import Image

from headwater.config.schema import RewardConfig
from headwater.core.errors import RewardFailed, UnknownName
from headwater.core.media import MediaBlock, MediaContent, PlacedMedia
from headwater.core.records import Answer, Score
from headwater.observe.spans import Spans
from headwater.rewards.managers.naive import NaiveRewardManager

FUNCTIONS = """
import asyncio, time

def number(data_source, solution_str, ground_truth, extra_info):
    return int(solution_str == ground_truth)

def details(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return {"score": 0.5 + bonus, "length": len(solution_str)}

async def slow_but_async(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.01)
    return 0.25

def raises(data_source, solution_str, ground_truth, extra_info):
    return {}["missing"]

def nothing(data_source, solution_str, ground_truth, extra_info):
    return None

def not_a_number(data_source, solution_str, ground_truth, extra_info):
    return float("nan")

def no_score(data_source, solution_str, ground_truth, extra_info):
    return {"points": 1}

def turns(data_source, solution_str, ground_truth, extra_info, messages):
    return {"score": len(messages), "last": messages[-1]["content"]}

def hangs(data_source, solution_str, ground_truth, extra_info):
    time.sleep(600)

CONSTANT = 3
"""


@pytest.fixture
def score(tmp_path):
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)

    def call(name: str, text: str = "46", **settings):
        path = f"{file}:{name}" if name else ""
        manager = NaiveRewardManager(RewardConfig(function=path, **settings), Spans())
        with closing(manager):
            return asyncio.run(manager.score(Answer(tiny.prompt(uid="row7"), text)))

    return call


def test_results_of_every_kind(score):
    assert score("number").value == 1.0
    result = score("details", function_args={"bonus": 0.25})
    assert (result.value, result.info) == (0.75, {"length": 2})
    assert score("slow_but_async").value == 0.25
    assert score("turns") == Score(2.0, {"last": "46"})  # the whole conversation, for who names it
    assert score("").value == 1.0  # no function: the built-in scorer of the row's data_source


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"reward raises on row row7 .*raised KeyError: 'missing' at .*functions\.py:\d+; fix the function"),
        ("nothing", "returned None; return a finite number"),
        (
            "not_a_number",
            r"reward not_a_number \(.*functions\.py:\d+\) on row row7 .* returned nan; return",
        ),
        ("no_score", r"returned a dict without 'score'; its keys are \['points'\]"),
    ],
)
def test_failures_are_never_numbers(score, name, message):
    with pytest.raises(RewardFailed, match=message):
        score(name)


def test_a_hanging_function_is_cut_off(score):
    with pytest.raises(RewardFailed, match=r"no result within 0.2 s; make it faster or raise reward\.timeout_s"):
        score("hangs", timeout_s=0.2)


def test_waiting_in_the_queue_does_not_count_as_time(tmp_path):
    def check(limit_s: float) -> None:
        file = tmp_path / f"slow_{limit_s:g}.py"
        file.write_text(f"import time\ndef compute_score(**row):\n    time.sleep({limit_s / 24})\n    return 1.0\n")
        config = RewardConfig(function=f"{file}:compute_score", timeout_s=limit_s, workers=1)

        async def many(manager):
            return await asyncio.gather(*(manager.score(Answer(tiny.prompt(), "x")) for _ in range(30)))

        with closing(NaiveRewardManager(config, Spans())) as manager:
            assert [score.value for score in asyncio.run(many(manager))] == [1.0] * 30

    long_enough(check, 1.2, 12.0)


def test_a_hanging_function_does_not_hold_up_the_end_of_the_process(tmp_path):
    file = tmp_path / "hang.py"
    file.write_text("import time\ndef compute_score(**row):\n    time.sleep(600)\n")
    code = f"""
import asyncio
from headwater.config.schema import RewardConfig
from headwater.core.errors import RewardFailed
from headwater.core.records import Prompt
from headwater.core.records import Answer
from headwater.observe.spans import Spans
from headwater.rewards.managers.naive import NaiveRewardManager
manager = NaiveRewardManager(RewardConfig(function={str(file) + ":compute_score"!r}, timeout_s=0.2), Spans())
try:
    asyncio.run(manager.score(Answer(Prompt("row", (), "text", (1,), "mine"), "x")))
except RewardFailed:
    print("failed as it should")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "failed as it should"


def test_bad_paths_are_named(score):
    with pytest.raises(UnknownName, match="has no 'nubmer'; did you mean 'number'"):
        score("nubmer")
    with pytest.raises(RewardFailed, match="not callable"):
        score("CONSTANT")


@pytest.mark.parametrize("name", ["nofile.py:nope", "headwater.rewards.scorers.exact_match:nope", "exact_mathc"])
def test_a_function_that_is_not_there_is_blamed_on_its_setting(name):
    with pytest.raises(UnknownName, match=rf"^reward\.function = {name}: "):
        NaiveRewardManager(RewardConfig(function=name), Spans())


def test_a_name_borrowed_from_the_file_is_said_to_be():
    manager = NaiveRewardManager(RewardConfig(), Spans())
    prompt = tiny.prompt(uid="nosrc#2/train/0", data_source="nosrc")
    remedies = r"add a data_source to the rows that names a scorer, or set reward\.function"
    with pytest.raises(
        RewardFailed, match=rf"'nosrc', the name of its file or task, which is the default .*{remedies}"
    ):
        asyncio.run(manager.score(Answer(prompt, "46")))


def test_an_unknown_data_source_says_what_to_set():
    manager = NaiveRewardManager(RewardConfig(), Spans())
    with pytest.raises(RewardFailed, match=r"no built-in scorer for data_source 'mine'.*set reward\.function"):
        asyncio.run(manager.score(Answer(tiny.prompt(data_source="mine"), "x")))


@pytest.mark.parametrize("name", ["openai/gsm8k", "gsm8k"])
def test_data_sources_with_an_owner_find_their_scorer(name):
    manager = NaiveRewardManager(RewardConfig(), Spans())
    answer = Answer(tiny.prompt(data_source=name, ground_truth="5"), "#### 5")
    assert asyncio.run(manager.score(answer)).value == 1.0


SIGNATURES = """
import asyncio, json
import numpy as np

def nothing_but_text(solution_str): return float(solution_str == "46")
def by_keyword(*, ground_truth, solution_str): return float(solution_str == ground_truth)
def with_column(solution_str, level, unit="none"): return {"score": level, "unit": unit}
def trl(prompts, completions, **kwargs):
    assert len(prompts) == len(completions) == len(kwargs["level"]) == 1
    return [float(completion == "46") + level for completion, level in zip(completions, kwargs["level"])]
def trl_chat(completions, ground_truth, **kwargs):
    return [float(each[0]["content"] == truth) for each, truth in zip(completions, ground_truth)]
async def trl_async(completions, level=(5,), **kwargs): return np.array([len(completions[0])]) * level[0]
def asked(question): return {"score": 1.0, "asked": question}
def trl_asked(completions, question): return [{"score": 1.0, "asked": each} for each in question]
def looked(images, videos=()): return {"score": len(images), "pixel": images[0].getpixel((0, 0)), "videos": len(videos)}
def trl_looked(completions, images): return [{"score": len(each), "pixel": each[0].getpixel((0, 0))} for each in images]
def trl_number(completions): return 1.0
def trl_two(completions): return [1.0, 2.0]

def verl_async(data_source, solution_str, ground_truth, extra_info):
    async def judge():
        await asyncio.sleep(0)
        return 0.75
    return asyncio.get_event_loop().run_until_complete(judge())

def own_loop(solution_str):
    async def judge():
        return 0.5
    return asyncio.run(judge())

def response_and_answer(response, answer): return 1.0
def positional(text, /): return 1.0
def fails_deep(solution_str): return json.loads("{")
class Reward:
    def __call__(self, solution_str): return 1.0
    @staticmethod
    def method(solution_str): return 0.125
"""


@pytest.fixture
def signatures(tmp_path):
    file = tmp_path / "signatures.py"
    file.write_text(SIGNATURES)

    def make(name: str, **settings) -> NaiveRewardManager:
        return NaiveRewardManager(RewardConfig(function=f"{file}:{name}", **settings), Spans())

    return make


def test_a_function_receives_what_it_names(signatures):
    plain = tiny.prompt(columns={"level": 3, "other": "x", "prompt": "12+34="})
    chat = tiny.prompt(columns={"level": 3})

    def value(name: str, prompt=plain, **settings):
        with closing(signatures(name, **settings)) as manager:
            return asyncio.run(manager.score(Answer(prompt, "46")))

    for name, prompt, expected in [
        ("nothing_but_text", plain, 1.0),
        ("by_keyword", plain, 1.0),
        ("trl", plain, 4.0),
        ("trl_chat", chat, 1.0),
        ("trl_async", plain, 6.0),
        ("trl_async", tiny.prompt(), 5.0),
        ("verl_async", plain, 0.75),
        ("own_loop", plain, 0.5),
    ]:
        assert value(name, prompt).value == expected, name
    assert value("with_column") == Score(3.0, {"unit": "none"})
    assert value("with_column", function_args={"level": 7, "unit": "cm"}) == Score(7.0, {"unit": "cm"})
    parts = ({"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]},)
    for prompt, question in [
        (plain, "12+34="),
        (tiny.prompt(columns={"question": "How many?"}), "How many?"),
        (replace(chat, messages=parts), "Why?"),
    ]:
        for name in ("asked", "trl_asked"):
            assert value(name, prompt, where="threads").info == {"asked": question}
    for name in ("trl_number", "trl_two"):
        with pytest.raises(RewardFailed, match=r"for one completion; return a list with one number"):
            value(name)
    with pytest.raises(RewardFailed, match=r"raised JSONDecodeError: .* at .*signatures\.py:\d+; fix"):
        value("fails_deep")


def test_a_function_receives_the_images_of_the_conversation(signatures):
    """Also in another process, where the function is loaded from its file."""

    def picture(color: str) -> PlacedMedia:
        stream = io.BytesIO()
        Image.new("RGB", (4, 4), color).save(stream, "png")
        return PlacedMedia(MediaContent.of("image", [stream.getvalue()]), (MediaBlock(0, 1),))

    @dataclass(frozen=True)
    class Seen(Answer):
        media: Any = ()

    shown = tiny.prompt(media=(picture("red"),))
    for name, where in (("looked", "processes"), ("looked", "threads"), ("trl_looked", "threads")):
        manager = signatures(name, where=where)
        manager.check_row(shown)
        try:
            alone = asyncio.run(manager.score(Answer(shown, "46")))
            more = asyncio.run(manager.score(Seen(shown, "46", (picture("blue"), picture("red")))))
        finally:
            manager.close()
        assert (alone.value, alone.info["pixel"]) == (1.0, (255, 0, 0))
        assert (more.value, more.info["pixel"]) == (2.0, (0, 0, 255)), "those that tools have shown, too"
    assert signatures("looked", where="threads").reads_column("images"), "a column of this name would come first"


def test_a_wrong_signature_is_found_before_anything_runs(signatures):
    row = tiny.prompt(columns={"anwser": "46"})
    with pytest.raises(RewardFailed, match=r"signatures\.py:\d+\): nothing provides its parameter 'response'.*rename"):
        signatures("response_and_answer").check_row(row)
    with pytest.raises(RewardFailed, match=r"parameter 'answer' for row row; did you mean 'anwser'\?"):
        signatures("response_and_answer", function_args={"response": ""}).check_row(row)
    with pytest.raises(RewardFailed, match=r"'text' cannot be given by name; remove the '/'"):
        signatures("positional")
    with pytest.raises(RewardFailed, match=r"reward\.function_args\.bonsu: reward\.function = .*no such parameter"):
        signatures("nothing_but_text", function_args={"bonsu": 1})
    with pytest.raises(RewardFailed, match="is a class; name a function"):
        signatures("Reward")
    signatures("with_column").check_row(tiny.prompt(columns={"level": 1}))


def test_a_file_without_a_function_name_provides_compute_score(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(solution_str): return 0.5\n")
    manager = NaiveRewardManager(RewardConfig(function=str(file)), Spans())
    with closing(manager):
        assert asyncio.run(manager.score(Answer(tiny.prompt(), "x"))).value == 0.5
    other = tmp_path / "other.py"
    other.write_text("def judge(solution_str): return 0.5\n")
    with pytest.raises(
        UnknownName, match=r"other\.py has no 'compute_score'; known: judge; name the function as .*other\.py:function"
    ):
        NaiveRewardManager(RewardConfig(function=str(other)), Spans())
