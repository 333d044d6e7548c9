"""Training and generating from Python, as a user's script does it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command import ROOT

from headwater import Callback, Config, ConfigError, Engine, Result, StopTraining, Trainer, train
from headwater.core.errors import DataError, HeadwaterError
from headwater.observe.run_directory import RunDirectory
from headwater.workflows import Episode

ROWS = [{"prompt": f"{a} + {b} =", "ground_truth": str(a + b), "level": "easy"} for a in range(6) for b in range(6)]
SMALL = {
    "rollout": {"max_new_tokens": 4, "num_samples_per_prompt": 2},
    "trainer": {"total_steps": 2, "num_prompts_per_step": 4},
    "eval": {"before": False, "after": True, "num_prompts": 4},
}


def small(tmp_path, **changes):
    settings = {section: {**values, **changes.pop(section, {})} for section, values in SMALL.items()}
    return {"model": "tiny:qwen3", "run": {"root": str(tmp_path)}, "progress": False, **settings, **changes}


class Recorded(Callback):
    def __init__(self) -> None:
        self.events = []

    def on_step_end(self, step, metrics):
        self.events.append(("step", step, "reward/mean" in metrics))

    def on_evaluate(self, step, metrics):
        self.events.append(("eval", step, "reward/mean" in metrics))

    def on_checkpoint(self, step, path):
        self.events.append(("checkpoint", step, (path / "model" / "config.json").is_file()))


def shorter(completions, level):
    """A function of a module: it runs in a worker process."""
    return [1.0 - len(each) / 100 for each in completions]


def test_training_with_objects_inside_a_running_event_loop(tmp_path):
    """Rows, a closure and a function of this module, callbacks, held-out rows; then the result is used."""
    seen = []

    def ends_well(solution_str, ground_truth, level):
        seen.append((solution_str, ground_truth, level))
        return {"score": len(solution_str) % 2, "length": len(solution_str)}

    recorded = Recorded()

    async def cell():  # a notebook runs its cells inside an event loop
        return train(
            data=ROWS,
            eval_data=ROWS[:4],
            reward={"well": ends_well, "short": {"function": shorter, "weight": 0.5}},
            callbacks=[recorded, lambda step, metrics: seen.append(step)],
            **small(tmp_path),
        )

    result = asyncio.run(cell())
    assert result.is_finished
    assert [record["step"] for record in result.metrics] == [1, 2]
    assert "reward/short/mean" in result.metrics[0]
    assert [record["step"] for record in result.evaluations] == [2]
    assert recorded.events == [("step", 1, True), ("step", 2, True), ("eval", 2, True), ("checkpoint", 2, True)]
    assert {1, 2} <= {each for each in seen if isinstance(each, int)}
    assert ("easy", True) in {(each[2], each[1].isdigit()) for each in seen if isinstance(each, tuple)}
    assert result.path == tmp_path / "run"
    assert Result(result.path).step == 2
    assert str(result).startswith(f"Result('{result.path}', 2 steps, held-out reward")
    answers = result.generate(["1 + 1 =", "2 + 2 ="], max_new_tokens=3, temperature=0)
    assert [len(each.tokens) for each in answers] == [3, 3]


def test_a_stopped_run_is_resumed_with_the_same_objects_and_refused_without_them(tmp_path, capsys):
    def stop(step, metrics):
        if step == 1:
            raise StopTraining("enough")

    def zero(solution_str):
        return 0.0

    first = train(data=ROWS, reward=zero, callbacks=[stop], **small(tmp_path))
    assert (first.step, first.is_finished) == (1, True)
    again = train(data=ROWS, reward=zero, resume=first.path, **small(tmp_path))
    assert (again.path, again.step) == (first.path, 2)
    swapped = [ROWS[0], *ROWS[2:], ROWS[1]]
    with pytest.raises(
        DataError, match=r"data.train: the rows are .* in another order: 35 of 36 rows moved, the first"
    ):
        train(data=swapped, reward=zero, resume=first.path, **small(tmp_path, trainer={"total_steps": 3}))
    with pytest.raises(DataError, match=r"num_rows = 36 in the checkpoint, 9 now.*resume with the data as they were"):
        train(data=ROWS[:9], reward=zero, resume=first.path, **small(tmp_path, trainer={"total_steps": 3}))
    text = (first.path / "config.yaml").read_text()
    assert "python:zero" in text
    assert "python:rows" in text
    from headwater.cli.main import main

    assert main(["train", "--resume", str(first.path), "trainer.total_steps=4"]) == 2
    error = capsys.readouterr().err
    assert "reward.function = 'python:zero'" in error
    assert "resume=RUN" in error
    assert main(["eval", str(first.path)]) == 2
    assert "object of the Python program" in capsys.readouterr().err
    with pytest.raises(HeadwaterError, match="requires resume"):
        Trainer(data=ROWS, reward=zero, **small(tmp_path)).train(step=1)
    with pytest.raises(ConfigError, match=r"data.train"):
        train(data="arithmetic", reward=zero, resume=first.path, **small(tmp_path, trainer={"total_steps": 4}))


def test_workflows_and_tools_as_objects(tmp_path):
    calls = []

    def double(number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        calls.append(number)
        return 2 * number

    class Scored:
        async def run(self, episode: Episode):
            await episode.reply()
            return episode.finish(await episode.score())

    async def once(episode: Episode):
        await episode.reply()
        return episode.finish(1.0)

    for number, workflow in enumerate((Scored(), once)):
        settings = small(tmp_path, trainer={"total_steps": 1}, run={"root": str(tmp_path), "name": f"w{number}"})
        rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "ground_truth": "1"} for row in ROWS]
        result = train(data=rows, reward=lambda solution_str: 0.5, workflow=workflow, **settings)
        assert result.metrics[0]["reward/mean"] == (0.5, 1.0)[number]
    tooled = Trainer(
        data=[{"prompt": [{"role": "user", "content": "Double 2."}]}] * 8,
        reward=lambda solution_str: 0.0,
        tools=double,
        **small(tmp_path, trainer={"total_steps": 1}),
    )
    assert tooled.config.rollout.workflow == "tool_agent"
    assert tooled.train().step == 1


def test_a_trainer_only_evaluates(tmp_path):
    trainer = Trainer(data=ROWS, eval_data=ROWS[:4], reward=lambda solution_str: 0.25, **small(tmp_path))
    result = trainer.evaluate()
    assert ([each["step"] for each in result.evaluations], result.metrics) == ([0], [])
    assert result.evaluations[0]["reward/mean"] == 0.25
    assert not trainer.config.eval.only, "evaluate() changes no setting of train()"


def test_evaluation_needs_no_training_data(tmp_path):
    """Also if the reward reads a column that the default task does not have."""
    rows = [{**row, "wanted": "7"} for row in ROWS[:2]]
    trainer = Trainer(eval_data=rows, reward=lambda solution_str, wanted: float(wanted == "7"), **small(tmp_path))
    assert trainer.evaluate().evaluations[0]["reward/mean"] == 1.0
    with pytest.raises(ConfigError, match="data: is missing"):
        trainer.train()


def test_stop_from_another_thread(tmp_path):
    trainer = Trainer(
        data=ROWS,
        reward=lambda solution_str: 0.0,
        **small(tmp_path, trainer={"total_steps": 500}, eval={"after": False}),
    )
    threading.Thread(target=trainer.stop).start()
    result = []
    thread = threading.Thread(target=lambda: result.append(trainer.train()))
    thread.start()  # no signal handlers: this is not the main thread
    while thread.is_alive():
        trainer.stop()
        thread.join(0.2)
    assert 1 <= result[0].step < 500


def test_an_interrupted_call_leaves_no_request_behind(monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with Engine("tiny:qwen3", max_sequences=2) as engine:
        monkeypatch.setattr("headwater.api.engine.wait_for_future", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["a"] * 8, max_new_tokens=2000)
        deadline = time.monotonic() + 120
        while (status := engine._engine.status()).num_running or status.num_waiting:
            assert time.monotonic() < deadline, status
            time.sleep(0.01)
        assert status.metrics["num_tokens_generated"] < 8 * 2000, "they were not ended, but came to their end"


def test_the_engine_generates_and_chats():
    with Engine("tiny:qwen3", max_sequences=4) as engine:
        one = engine.generate("1 + 1 =", max_new_tokens=5, temperature=0)
        assert len(one.tokens) == len(one.logprobs) == 5
        assert str(one) == one.text
        tokens = engine.tokenizer.encode("1 + 1 =", add_special_tokens=False)
        assert engine.generate(tokens, max_new_tokens=5, temperature=0).tokens == one.tokens
        several = engine.generate(["a", "b", "c"], max_new_tokens=4, seed=3)
        assert [each.tokens for each in engine.generate(["a", "b", "c"], max_new_tokens=4, seed=3)] == [
            each.tokens for each in several
        ]
        assert engine.chat("hello", max_new_tokens=2).tokens
        assert len(engine.chat([[{"role": "user", "content": "x"}]] * 2, max_new_tokens=2)) == 2
        with pytest.raises(HeadwaterError, match="temperatur"):
            engine.generate("a", temperatur=1)
    with pytest.raises(HeadwaterError, match="closed"):
        engine.generate("a")
    with pytest.raises(ConfigError, match=r"engine.max_sequence \(Python\)"):
        Engine("tiny:qwen3", max_sequence=4)


SCRIPT = """
import sys
from headwater import train

def correct(solution_str, ground_truth):
    return float(solution_str == ground_truth)

{guard}
    result = train(
        model="tiny:qwen3", data=sys.argv[1], reward=correct, progress=False, run={{"root": sys.argv[2]}},
        rollout={{"max_new_tokens": 4, "num_samples_per_prompt": 2}}, eval={{"before": False, "after": False}},
        trainer={{"total_steps": 1, "num_prompts_per_step": 4}},
    )
    print(result.path)
"""


@pytest.mark.slow
def test_a_script_with_a_guard_has_rewards_in_workers_and_resumes_from_the_command_line(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    for guard, function in (('if __name__ == "__main__":', r"script\d\.py:correct"), ("if True:", "python:correct")):
        script = tmp_path / ("script1.py" if "__main__" in guard else "script2.py")
        script.write_text(SCRIPT.format(guard=guard))
        done = subprocess.run(
            [sys.executable, str(script), str(rows), str(tmp_path / "runs")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        path = Path(done.stdout.strip().splitlines()[-1])
        assert re.search(rf"function: .*{function}", (path / "config.yaml").read_text())
    from headwater.cli.main import main

    assert main(["train", "--resume", str(tmp_path / "runs" / "run"), "trainer.total_steps=2"]) == 0
    assert RunDirectory(tmp_path / "runs" / "run").checkpoint_steps() == [1, 2]
    assert main(["train", "--resume", str(tmp_path / "runs" / "run-2"), "trainer.total_steps=2"]) == 2


@pytest.mark.slow
def test_the_scripts_of_the_documentation_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/python-api.md", "docs/coming-from-trl.md")]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)]
    scripts = [block for block in blocks if "from headwater import" in block]
    scripts.append((ROOT / "examples/train_from_python.py").read_text())
    assert len(scripts) == 7
    for script in scripts:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    assert len(list((tmp_path / "runs").iterdir())) == 6


def test_the_config_is_checked_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        train(data=str(tmp_path / "missing.jsonl"), reward=lambda solution_str: 0.0, **small(tmp_path))
    with pytest.raises(ConfigError, match="data: is missing; give a list of dicts"):
        train(reward=lambda solution_str: 0.0, **small(tmp_path))
    with pytest.raises(ConfigError, match="is not a Callback object"):
        Trainer("quickstart", callbacks=[Recorded])
    assert not any(tmp_path.iterdir())
    assert Trainer("quickstart", trainer={"total_steps": 3}).config.trainer.total_steps == 3
    assert Config("quickstart").run.name == "quickstart"
