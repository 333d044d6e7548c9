"""Strict conversion by type hints, and the nearest known key for an unknown one."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Optional

from headwater.config.constraints import AtLeast, Extension, MoreThan, NotEmpty, Within
from headwater.config.convert import Converter
from headwater.config.load import load_config
from headwater.config.recipe import TreeBuilder
from headwater.config.tree import Origin
from headwater.config.yaml12 import compose


@dataclass(frozen=True)
class Inner:
    depth: Annotated[int, AtLeast(1)] = 1


@dataclass(frozen=True)
class Part:
    text: str = ""
    count: int = 0
    rate: float = 0.5
    flag: bool = False
    choice: Literal["on", "off", "auto"] = "auto"
    names: tuple[str, ...] = ()
    sizes: tuple[Annotated[int, AtLeast(1)], ...] = ()
    limit: int | None = None
    old_limit: Optional[Annotated[float, MoreThan(0)]] = None  # noqa: UP045 - both spellings must work
    free: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    share: Annotated[float, MoreThan(0, "use 1.0 for all"), Within(0, 1)] = 1.0
    plugin: Annotated[str, Extension("headwater.workflows")] = "rlvr"
    title: Annotated[str, NotEmpty("name it")] = "x"
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class Root:
    part: Part = field(default_factory=Part)


def build(text: str) -> tuple[Part, list[str]]:
    converter = Converter(Root)
    root = converter.build(TreeBuilder(Origin("r.yaml", 0)).root(compose(text)))
    return root.part, converter.problems


def part(text: str) -> Part:
    built, found = build(f"part: {{{text}}}")
    assert found == []
    return built


VALUES = [
    ("text: no", "text", "no"),
    ("text: '3'", "text", "3"),
    ("count: -7", "count", -7),
    ("count: 0x10", "count", 16),
    ("count: 0o17", "count", 15),
    ("rate: 1e-6", "rate", 1e-6),
    ("rate: 2.", "rate", 2.0),
    ("rate: .5", "rate", 0.5),
    ("rate: 3", "rate", 3.0),
    ("rate: -.inf", "rate", float("-inf")),
    ("flag: True", "flag", True),
    ("choice: off", "choice", "off"),
    ("names: one", "names", ("one",)),
    ("names: []", "names", ()),
    ("sizes: [1, 2]", "sizes", (1, 2)),
    ("limit: null", "limit", None),
    ("limit: 3", "limit", 3),
    ("old_limit: ~", "old_limit", None),
    ("old_limit: 2", "old_limit", 2.0),
    ("free: {a: {b: [1, no, 1e3, null]}}", "free", {"a": {"b": [1, "no", 1000.0, None]}}),
    ("weights: {a: 1}", "weights", {"a": 1.0}),
    ("plugin: my.module:Thing", "plugin", "my.module:Thing"),
    ("plugin: multi_turn", "plugin", "multi_turn"),
    ("inner: {depth: 2}", "inner", Inner(2)),
]


def test_values_by_type():
    for text, name, expected in VALUES:
        value = getattr(part(text), name)
        assert value == expected, text
        assert type(value) is type(expected), text


WRONG_VALUES = [
    ("count: '3'", "part.count = '3' (r.yaml:1): must be a whole number; remove the quotes"),
    ("count: 1_000", "part.count = '1_000' (r.yaml:1): must be a whole number; write it without underscores"),
    ("count: 1e3", "part.count = 1000.0 (r.yaml:1): must be a whole number; write 1000"),
    ("count: 2.5", "part.count = 2.5 (r.yaml:1): must be a whole number"),
    ("count: true", "part.count = true (r.yaml:1): must be a whole number"),
    ("count: null", "part.count = null (r.yaml:1): must be a whole number; remove it for the default"),
    ("count: [1]", "part.count = [1] (r.yaml:1): must be a whole number"),
    ("count: {a: 1}", "part.count = {a: 1} (r.yaml:1): must be a whole number"),
    ("rate: nan", "part.rate = 'nan' (r.yaml:1): must be a finite number"),
    ("rate: -Inf", "part.rate = '-Inf' (r.yaml:1): must be a finite number"),
    ("count: nan", "part.count = 'nan' (r.yaml:1): must be a whole number"),
    ("rate: '1e-6'", "part.rate = '1e-6' (r.yaml:1): must be a number; remove the quotes"),
    ("rate: fast", "part.rate = 'fast' (r.yaml:1): must be a number"),
    ("rate: false", "part.rate = false (r.yaml:1): must be a number"),
    ("rate: .nan", "part.rate = .nan (r.yaml:1): must be a finite number, not NaN"),
    ("flag: yes", "part.flag = 'yes' (r.yaml:1): must be true or false; write true"),
    ("flag: 0", "part.flag = 0 (r.yaml:1): must be true or false; write false"),
    ("flag: maybe", "part.flag = 'maybe' (r.yaml:1): must be true or false"),
    ("text: null", "part.text = null (r.yaml:1): must be text; use '' for empty text, or remove it"),
    ("text: 3", "part.text = 3 (r.yaml:1): must be text; put it in quotes"),
    ("text: true", "part.text = true (r.yaml:1): must be text; put it in quotes"),
    ("choice: offf", "part.choice = 'offf' (r.yaml:1): no such choice; did you mean 'off'? known: on, off, auto"),
    ("choice: true", "part.choice = true (r.yaml:1): no such choice; known: on, off, auto"),
    ("names: [a, 3]", "part.names = [a, 3] (r.yaml:1): must be text; put it in quotes"),
    ("names: null", "part.names = null (r.yaml:1): must be a list; use [] for none"),
    ("names: {a: 1}", "part.names = {a: 1} (r.yaml:1): must be a list; write it as [first, second]"),
    ("names: ''", "part.names = '' (r.yaml:1): must be a list; use [] for none"),
    ("sizes: [1, 0]", "part.sizes = [1, 0] (r.yaml:1): must be >= 1"),
    ("limit: x", "part.limit = 'x' (r.yaml:1): must be a whole number"),
    ("old_limit: 0", "part.old_limit = 0 (r.yaml:1): must be > 0"),
    ("free: 3", "part.free = 3 (r.yaml:1): must be a mapping; write it as {key: value}"),
    ("free: null", "part.free = null (r.yaml:1): must be a mapping; use {} for none"),
    ("weights: {a: x}", "part.weights = {a: x} (r.yaml:1): a: must be a number"),
    ("share: 0", "part.share = 0 (r.yaml:1): must be > 0; use 1.0 for all"),
    ("share: 1.5", "part.share = 1.5 (r.yaml:1): must be in [0, 1]"),
    ("plugin: rlv", "part.plugin = 'rlv' (r.yaml:1): no such name; did you mean 'rlvr'? known: "),
    ("title: ''", "part.title = '' (r.yaml:1): must not be empty; name it"),
    ("inner: {depth: 0}", "part.inner.depth = 0 (r.yaml:1): must be >= 1"),
    ("inner: 3", "part.inner = 3 (r.yaml:1): this is a section; give its keys below it, such as part.inner.depth"),
    ("old_limit: .inf", "part.old_limit = .inf (r.yaml:1): must be > 0 and finite"),
]


def test_wrong_values_say_what_they_must_be():
    for text, expected in WRONG_VALUES:
        built, found = build(f"part: {{{text}}}")
        assert built == Part(), text
        assert len(found) == 1, text
        assert found[0].startswith(expected), text


def test_a_number_beyond_all_floats_is_a_problem_or_a_value_but_no_crash():
    for name in ("rate", "old_limit", "count", "inner"):
        build(f"part: {{{name}: {10**400}}}")


def test_all_problems_are_reported_and_the_rest_is_kept():
    built, found = build("part:\n  count: x\n  rate: 2\n  flag: 3\n  nope: 1\n")
    assert built == Part(rate=2.0)
    assert [line.split(" (")[0] for line in found] == ["part.count = 'x'", "part.flag = 3", "part.nope"]
    assert "(r.yaml:4)" in found[1]


def test_a_long_value_is_cut_in_the_message():
    (line,) = build(f"part: {{count: {'x' * 500}}}")[1]
    assert len(line) < 200


def test_free_form_values_are_copies_that_pickle():
    loaded = load_config(None, ["data.task_args={a: [1, {b: 2}]}"])
    again = pickle.loads(pickle.dumps(loaded))
    assert again.config == loaded.config
    assert again.origins == loaded.origins
    assert load_config(None).config.data.task_args is not load_config(None).config.data.task_args


UNKNOWN_KEYS = [
    ("trainer.total_step=3", "trainer.total_step (command line): no such key; did you mean trainer.total_steps?"),
    ("rollout.share_prompts=3", "rollout.share_prompts (command line): no such key; did you mean learner.share_"),
    ("data.reward_fn_key=x", "data.reward_fn_key (command line): no such key; this is verl's name for data.data_so"),
    (
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.rollout.n (command line): no such key; this is verl's name for roll",
    ),
    ("num_generations=3", "num_generations (command line): no such key; this is TRL's name for rollout.num_samples_pe"),
    ("rollout.num_generations=3", "rollout.num_generations (command line): no such key; this is TRL's name for roll"),
    ("rollout.learning_rate=3", "rollout.learning_rate (command line): no such key; did you mean "),
    ("share_prompts=3", "share_prompts (command line): no such key; did you mean learner.share_prompts?"),
    ("rolout.top_k=3", "rolout.top_k (command line): no such key; did you mean rollout.top_k?"),
    ("rolout.topk=3", "rolout.topk (command line): no such key; did you mean rollout.top_k or eval.top_k?"),
    ("optimiser.share_prompt=3", "optimiser.share_prompt (command line): no such key; did you mean learner.share_"),
    ("trainer.shrae_prompts=3", "trainer.shrae_prompts (command line): no such key; did you mean learner.share_p"),
    ("rolout={top_k: 3, top_p: 1.0}", "rolout (command line): no such section; did you mean rollout?"),
    ("qqq.zzz=3", "qqq.zzz (command line): no such key; known sections: run, model, "),
    ("run.zzzz=3", "run.zzzz (command line): no such key; known keys of run: name, project, root, if_exists"),
]


def test_an_unknown_key_gets_the_nearest_known_one(problems):
    for override, expected in UNKNOWN_KEYS:
        (line,) = problems(None, override)
        assert line.startswith(expected), override


FOREIGN_KEYS = [
    ("actor_rollout_ref.rollout.n=4", "this is verl's name for rollout.num_samples_per_prompt"),
    ("rollout.n=4", "this is verl's name for rollout.num_samples_per_prompt"),
    ("algorithm.adv_estimator=grpo", "this is verl's name for algorithm.advantage"),
    ("critic={optim: {lr: 1e-5}}", "this is verl's name for critic.learning_rate"),
    ("actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4", "this is verl's name for rollout.launch.args"),
    ("trainer.balance_batch=true", "verl has it, but Headwater does not: it is always done"),
    ("gconfig.n_samples=4", "this is AReaL's name for rollout.num_samples_per_prompt"),
    ("evaluator={freq_epochs: 1}", "this is AReaL's name for eval.every_epochs"),
    ("ref.path=x", "this is AReaL's name for reference.path"),
    ("ref.dtype=bfloat16", "AReaL has it, but Headwater does not: the reference has the settings of the learner"),
]


def test_a_key_of_verl_or_areal_gets_ours(problems):
    for override, expected in FOREIGN_KEYS:
        (line,) = problems(None, override)
        assert f"(command line): no such key; {expected}" in line, override


def test_a_recipe_of_verl_is_answered_line_by_line(write, problems):
    recipe = write(
        "verl.yaml",
        "actor_rollout_ref:\n  rollout: {n: 4, name: vllm}\ncritic:\n  optim:\n    lr: 1e-5\n    betas: [0.9, 0.99]\n",
    )
    assert [line.partition(" ")[0] for line in problems(recipe)] == [
        "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.name", "critic.optim.lr", "critic.optim.betas",
    ]  # fmt: skip


def test_a_name_in_several_sections_suggests_each(problems):
    (line,) = problems(None, "rollout.learning_rate=3")
    assert "warm_start.learning_rate" in line
    assert "learner.learning_rate" in line


def test_an_unknown_section_names_every_place_it_was_given(write, problems):
    recipe = write("r.yaml", "rolout:\n  top_k: 3\n")
    (line,) = problems(recipe, "rolout.top_p=1.0")
    assert line.startswith("rolout (r.yaml:2, command line): no such section")


def test_the_message_of_the_error_is_one_line_per_problem(write, problems):
    recipe = write("recipes/x.yaml", "run:\n  seed: 3\nrollout:\n\n  max_staleness: -1\n")
    assert problems(recipe, "run.seed=-1") == [
        "run.seed = -1 (command line): must be >= 0",
        "rollout.max_staleness = -1 (recipes/x.yaml:5): must be >= 0; use 0 for synchronous training",
    ]
