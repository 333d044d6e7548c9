"""Algorithms from outside the package: their traits and ranges are read without importing them, and they train."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from headwater.cli.main import main
from headwater.config.declared import read_declared
from headwater.config.load import load_config
from headwater.config.traits import AdvantageTraits, LossTraits

ADVANTAGE = '''
from __future__ import annotations

from typing import Annotated

import torch

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages
from headwater.config.constraints import Within
from headwater.config.traits import AdvantageTraits


@ADVANTAGES.register(AdvantageTraits(needs_values=True, varies_by_token=True))
def surprise(inputs: AdvantageInputs, *, share: Annotated[float, Within(0, 1)] = 0.5) -> Advantages:
    """The score minus a share of the critic's value."""
    returns = inputs.scores[:, None] * inputs.mask
    return Advantages(returns - share * inputs.values, returns)
'''
LOSS = """
from __future__ import annotations

from typing import Annotated, Literal

import torch

from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs
from headwater.config.constraints import MoreThan, NotBelow
from headwater.config.traits import LossTraits

Shape = Literal["square", "plain"]


@POLICY_LOSSES.register(LossTraits(needs_all_samples=True))
def pulled(
    inputs: PolicyLossInputs,
    *,
    strength: Annotated[float, MoreThan(0)] = 0.1,
    shape: Shape = "square",
    low: float = 0.0,
    high: Annotated[float, NotBelow("low")] = 1.0,
    limit: float | None = None,
) -> PolicyLoss:
    pull = (inputs.logprobs - inputs.old_logprobs).square()
    return PolicyLoss(-inputs.advantages * inputs.logprobs + strength * pull)
"""
SMALL = [
    "quickstart", "trainer.total_steps=2", "trainer.num_prompts_per_step=2",
    "rollout.num_samples_per_prompt=2", "data.num_train_rows=16", "warm_start.num_steps=0", "eval.every_steps=0",
    "eval.before=false", "eval.after=false", "trainer.save_rollouts_every_steps=0",
]  # fmt: skip


@pytest.fixture
def advantage(tmp_path):
    (tmp_path / "mine.py").write_text(ADVANTAGE)
    return f"algorithm.advantage={tmp_path}/mine.py:surprise"


@pytest.fixture
def loss(tmp_path):
    (tmp_path / "losses.py").write_text(LOSS)
    return f"algorithm.policy_loss={tmp_path}/losses.py:pulled"


ALL_SAMPLES = "learner.skip_zero_advantages=false"


def test_an_advantage_that_needs_values_needs_a_critic(advantage, problems):
    (line,) = problems(None, advantage)
    assert line.startswith("algorithm.advantage = ")
    assert "needs the values of a critic; set critic.enabled=true" in line
    load_config(None, [advantage, "critic.enabled=true", "rollout.num_samples_per_prompt=1"])


def test_an_advantage_without_traits_is_checked_as_one_that_needs_nothing(tmp_path, problems):
    (tmp_path / "plain.py").write_text("def plain(inputs): ...\n")
    plain = f"algorithm.advantage={tmp_path}/plain.py:plain"
    load_config(None, [plain, "rollout.num_samples_per_prompt=1"])
    (line,) = problems(None, plain, "critic.enabled=true")
    assert "declare needs_values=True in its AdvantageTraits" in line


def test_a_loss_of_all_samples_computes_them_all(loss, problems):
    (line,) = problems(None, loss)
    assert line.startswith("learner.skip_zero_advantages = true")
    assert "losses.py:pulled depends on them; use false" in line
    load_config(None, [loss, ALL_SAMPLES])


def test_arguments_are_checked_by_the_signature(advantage, loss, problems):
    wrong = [
        (f"{{share: {2}}}", "", "algorithm.advantage_args.share = 2 (command line): must be in [0, 1]"),
        ("{shar: 0.5}", "", "algorithm.advantage_args.shar = 0.5 (command line): no such argument; advantage "),
        ("", "{strength: 0}", "algorithm.policy_loss_args.strength = 0 (command line): must be > 0"),
        ("", "{strength: much}", "algorithm.policy_loss_args.strength = 'much' (command line): must be a number"),
        ("", "{shape: round}", "algorithm.policy_loss_args.shape = 'round' (command line): no such choice; known: squ"),
        (
            "",
            "{low: 3}",
            "algorithm.policy_loss_args.low = 3 (command line): must be <= high = 1.0; lower it, or",
        ),
        ("", "{low: 3, high: 2}", "algorithm.policy_loss_args.high = 2 (command line): must be >= low = 3; raise it"),
        ("", "{limit: x}", "algorithm.policy_loss_args.limit = 'x' (command line): must be a number"),
    ]
    for of_advantage, of_loss, expected in wrong:
        given = [f"algorithm.advantage_args={of_advantage or '{}'}", f"algorithm.policy_loss_args={of_loss or '{}'}"]
        (line,) = problems(None, advantage, loss, "critic.enabled=true", ALL_SAMPLES, *given)
        assert line.startswith(expected), line
    good = ["algorithm.policy_loss_args={low: -1, high: 5, limit: null, shape: plain}", "critic.enabled=true"]
    load_config(None, [advantage, loss, ALL_SAMPLES, *good])


def test_both_train_through_the_real_trainer(advantage, loss, tmp_path, capsys):
    settings = [advantage, "algorithm.advantage_args.share=0.25", loss, "critic.enabled=true", ALL_SAMPLES]
    assert main(["train", *SMALL, f"run.root={tmp_path}/runs", *settings]) == 0, capsys.readouterr().err
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert any("actor/loss" in step and "critic/loss" in step for step in steps), steps


def test_neither_the_extension_nor_torch_is_imported(advantage, tmp_path):
    (tmp_path / "mine.py").write_text(
        f"raise SystemExit('imported')\n{ADVANTAGE.replace('from __future__ import annotations', '')}"
    )
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported the package')\n")
    (package / "inner" / "__init__.py").write_text("from .real import surprise as renamed\n")
    (package / "inner" / "real.py").write_text(ADVANTAGE)
    code = (
        "import sys\n"
        "from headwater.config.declared import read_declared\n"
        "from headwater.config.traits import AdvantageTraits\n"
        f"for name in ({f'{tmp_path}/mine.py:surprise'!r}, 'package.inner:renamed', 'package.inner.real:surprise'):\n"
        "    declared = read_declared(AdvantageTraits, name)\n"
        "    assert declared.traits.needs_values, name\n"
        "    assert list(declared.problems({'share': 3})), name\n"
        "assert 'torch' not in sys.modules and 'package' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


WRONG_DECLARATIONS = [
    (
        "@R.register(AdvantageTraits(needs_values=FLAG))\ndef f(x): ...",
        "needs_values is not a literal (FLAG)",
    ),
    ("@R.register(TRAITS)\ndef f(x): ...", "write them as register(AdvantageTraits(...))"),
    (
        "@R.register(AdvantageTraits(need_values=True))\ndef f(x): ...",
        "no such trait 'need_values'; did you mean '",
    ),
    ("@R.register(AdvantageTraits(needs_values=1))\ndef f(x): ...", "needs_values = 1 must be true or false"),
    ("@R.register(AdvantageTraits(True))\ndef f(x): ...", "write each trait as a keyword"),
    (
        "@R.register(LossTraits())\ndef f(x): ...",
        "is registered with LossTraits, and algorithm.adv",
    ),
    (
        "@R.register(AdvantageTraits(whitens='white'))\ndef f(x, *, whited=True): ...",
        "the argument 'white', which",
    ),
    ("def f(x, *, a: Annotated[float, AtLeast(LOW)] = 1): ...", "an argument of AtLeast is not a literal (LOW)"),
    ("def f(x, *, a: Annotated[float, AtLeast()] = 1): ...", "missing 1 required positional argument"),
    ("def f(x:", "not valid Python"),
]


def test_a_declaration_that_cannot_be_read_says_where_and_what_to_write(tmp_path, problems):
    for number, (text, expected) in enumerate(WRONG_DECLARATIONS):
        file = tmp_path / f"wrong{number}.py"
        file.write_text(text)
        (line,) = problems(None, f"algorithm.advantage={file}:f")
        assert line.startswith("algorithm.advantage = ")
        assert f"wrong{number}.py:1: " in line or ":2: " in line, line
        assert expected in line, line


def test_what_only_an_import_could_tell_is_left_to_the_import(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from typing import Annotated, Callable, Optional, Sequence\nimport functools, other\nfrom other import Alias\n"
        "def f(x, *, a: Alias = 1, b: 'int | str' = 2, c: Callable = print, d: Optional[int] = None,\n"
        "      e: Sequence[float] = (), g: Annotated[float, 'a note'] = 1.0, h=3, i: 'float' = 1, **more): ...\n"
        "made = functools.partial(f)\n"
        "class Thing:\n    def __init__(self, *, size: int = 3): ...\n"
    )
    declared = read_declared(AdvantageTraits, f"{file}:f")
    assert list(declared.problems({"a": "x", "b": "x", "c": "x", "h": "x", "unknown": 1, "e": [1, 2], "d": None})) == []
    found = dict(declared.problems({"d": "x", "e": ["x"], "g": "x", "i": "x"}))
    assert set(found) == {"d", "e", "g", "i"}
    assert read_declared(AdvantageTraits, f"{file}:made") is None
    assert read_declared(LossTraits, f"{file}:missing") is None
    assert read_declared(LossTraits, "no.such.module:thing") is None
    assert read_declared(LossTraits, "no_such_file.py:thing") is None
    assert list(dict(read_declared(LossTraits, f"{file}:Thing").problems({"size": 1, "sise": 1}))) == ["sise"]


def test_an_edited_file_is_read_again(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(x): ...\n")
    assert not read_declared(AdvantageTraits, f"{file}:f").traits.needs_values
    file.write_text("@A.register(AdvantageTraits(needs_values=True))\ndef f(x): ...\n")
    assert read_declared(AdvantageTraits, f"{file}:f").traits.needs_values
