"""No silent no-ops. The tests walk over every leaf of the schema:

- Two runs read it, a plain one and one with a critic, tools, adapters and more; or tests of servers, ranks, clusters
  and the sandbox read it with another value than the default (``READ_ELSEWHERE``).
- If the plain run would ignore it, such a value is refused there because nothing reads it, or the run says at its start
  that it has no effect.
- Settings that a run reads, unless another one takes their place, are refused beside that one (``SHADOWED``). The
  table is written by hand: a pair that is missing there is not found.

Not refused are the settings of a feature that the same file, or the same command line, turns off, such as
``lora.rank=0 lora.alpha=64``: recipes keep them for the day on which the feature is turned on again.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import types
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from integration.command import PROCESS_LIMIT_S, ROOT

import headwater
from headwater import train
from headwater.config.explain import to_yaml
from headwater.config.keys import settings
from headwater.config.load import load_config
from headwater.config.notices import config_notices
from headwater.config.schema import Config
from headwater.core.errors import ConfigError

PACKAGE = Path(headwater.__file__).parent
READERS = ("schema.py", "rollout_schema.py", "cluster_schema.py", "arguments.py")
"""Files of the config folder whose reads count: properties of the schema, and arguments that are passed on."""


def varied(solution_str: str) -> float:
    return zlib.crc32(solution_str.encode()) % 7


PLAIN_RUN = {
    "data": {"train": "largest_digit", "task_args": {"num_digits": 6, "demonstrations": "any_digit"}},
    "warm_start": {"num_steps": 1, "num_sequences_per_step": 4},
    "rollout": {"num_samples_per_prompt": 2, "max_new_tokens": 4},
    "trainer": {"total_steps": 1, "num_prompts_per_step": 4, "trace": True, "checkpoint_every_steps": 1},
    "eval": {"num_prompts": 4},
    "reward": {"function": lambda solution_str: varied(solution_str)},
}
RICH_RUN = {
    **PLAIN_RUN,
    "warm_start": {},
    "rollout": {
        "num_samples_per_prompt": 2,
        "max_new_tokens": 4,
        "max_staleness": 1,
        "on_stale": "drop",
        "workflow": "tool_agent",
    },
    "tools": {"use": ["calculator"]},
    "algorithm": {
        "advantage": "gae",
        "advantage_args": {"whitened": False},
        "kl_in_reward": 0.1,
        "kl_in_loss": 0.1,
        "kl_target": 0.1,
        "old_logprobs": "recompute",
        "corrections": ["truncate"],
        "filter_groups": True,
        "max_filter_rounds": 1,
        "normalize_rewards": {"mean_level": "batch", "std_level": "batch"},
        "normalize_advantages": {"mean_level": "batch"},
    },
    "learner": {"schedule": "linear", "skip_zero_advantages": False},
    "critic": {"enabled": True},
    "reward": {
        "overlong_tokens": 2,
        "clip": 5.0,
        "manager": "batch",
        "function": lambda solution_strs: [varied(each) for each in solution_strs],
    },
    "lora": {"rank": 2},
}

UNIT = "tests/unit"
READ_ELSEWHERE = {
    f"{UNIT}/backends/test_choice.py": (
        "rollout.launch.num_servers", "rollout.launch.devices", "rollout.launch.tensor_parallel", "rollout.device",
        "rollout.weight_transfer", "rollout.weight_link", "rollout.weight_encoding", "rollout.weight_folder",
    ),
    f"{UNIT}/backends/test_vllm.py": (
        "rollout.server_timeout_s", "rollout.launch.python", "rollout.launch.args",
    ),
    f"{UNIT}/engine/test_lora_adapters.py": ("engine.adapter_alpha", "engine.adapter_targets"),
    f"{UNIT}/sandbox/test_sandbox.py": (
        "sandbox.isolation", "sandbox.memory_mib", "sandbox.cpu_s", "sandbox.timeout_s", "sandbox.max_processes",
        "sandbox.max_file_mib", "sandbox.max_output_kib", "sandbox.max_concurrent", "sandbox.preload",
    ),
    f"{UNIT}/trainer/test_experience_reward_model.py": ("reward.model_weight",),
    f"{UNIT}/trainer/test_experience_normalized.py": tuple(
        f"algorithm.normalize_{what}.{name}"
        for what in ("rewards", "advantages")
        for name in ("leave_one_out", "unbiased", "epsilon")
    ),
    f"{UNIT}/learner/test_fused_layers.py": ("learner.fused_layers",),
    f"{UNIT}/learner/test_loss_scale.py": ("learner.loss_scale", "learner.loss_scale_growth_steps"),
    f"{UNIT}/learner/test_working_copies.py": ("learner.convert_at_once",),
    f"{UNIT}/learner/test_joined_training.py": ("learner.join_projections",),
    f"{UNIT}/trainer/test_step_metrics.py": ("trainer.profile.ranks", "trainer.profile.memory"),
    f"{UNIT}/cluster/test_ray_actor.py": ("cluster.wait_for_nodes_s", "cluster.object_store_mib"),
    f"{UNIT}/cluster/test_resources.py": (
        "cluster.learner.num_ranks", "cluster.learner.cpus_per_rank", "cluster.learner.strategy",
        "cluster.learner.labels", "cluster.rollout.cpus_per_server", "cluster.rollout.labels",
        "cluster.reward.num_actors", "cluster.reward.cpus_per_actor", "cluster.reward.labels",
        "cluster.tools.num_actors", "cluster.tools.cpus_per_actor", "cluster.tools.labels",
    ),
}  # fmt: skip
"""What the runs below do not read, because it needs servers, several ranks, a cluster, a GPU, a sandbox or a reward
model: the tests that fail if the setting is ignored."""
NOT_SEEN = {
    "rollout.weight_transfer",  # backends ask ``chosen_transfer`` in the config folder, which the checks use too
    *(key for key in settings(Config) if re.match(r"algorithm\.normalize_\w+\.", key)),  # passed on as a whole
}
"""Settings whose reads are not recorded. The tests above compare results."""

SAID_OTHERWISE = {
    "rollout.servers": "does not talk to servers",
    "rollout.device": "runs on the learner's device",
    "rollout.weight_encoding": "only rollout.weight_transfer=collective to servers encodes weights",
    "rollout.weight_folder": "only rollout.weight_transfer=file to servers writes weights to a folder",
    "rollout.publish": "the run trains no adapters",
    "rollout.update_order": "the run has only one engine",
    "rollout.allow_partial_groups": "ends the run at the first failure",
    **{f"engine.adapter_{name}": "a run sets this from lora." for name in ("rank", "alpha", "targets")},
    "tools.use": "calls no tools",
    "tools.config": "calls no tools",
    "reward.join": "late scores would save no time",
    "algorithm.normalize_rewards.mean_level": "this would change nothing",
    "algorithm.normalize_rewards.std_level": "this would change nothing",
    "critic.enabled": "would have no effect",
    "reference.path": "nothing reads the reference",
    **{f"eval.{name}": "is greedy and samples nothing" for name in ("top_k", "top_p", "min_p")},
}
"""How a refusal says that nothing would read a setting, if not in the words ``nothing reads this``."""

SHADOWED = (
    ("engine.memory_fraction", ["engine.kv_cache_gib=1", "engine.memory_fraction=0.5"]),
    ("engine.deterministic", ["run.deterministic=true", "engine.deterministic=false"]),
    ("learner.join_projections", ["run.deterministic=true", "learner.join_projections=true"]),
    ("learner.join_projections", ["learner.fused_layers=false", "learner.join_projections=true"]),
    ("learner.join_projections", ["learner.convert_at_once=false", "learner.join_projections=true"]),
    ("learner.join_projections", ["learner.compile=true", "learner.join_projections=true"]),
    ("learner.join_projections", ["lora.rank=4", "learner.join_projections=true"]),
    ("learner.fused_layers", ["learner.compile=true", "learner.fused_layers=true"]),
    ("engine.keep_addresses", ["learner.residency=[weights]", "engine.keep_addresses=false"]),
    ("rollout.device", ["rollout.backend=native", "rollout.servers=[http://127.0.0.1:1]", "rollout.device=cpu"]),
    ("algorithm.aggregation", [
        "algorithm.policy_loss=sapo", "algorithm.policy_loss_args={aggregation: token-sum}",
        "algorithm.aggregation=seq-mean-token-sum",
    ]),
    ("run.if_exists", ["eval.only=true", {"run.if_exists": "resume"}]),
    ("eval.every_steps", ["eval.only=true", {"eval.every_steps": 1}]),
    ("data.num_eval_rows", ["eval.before=false", "eval.after=false", {"data.num_eval_rows": 4}]),
    ("trainer.num_tracked_samples", [
        "trainer.trackers=[tensorboard]", "eval.before=false", "eval.after=false", {"trainer.num_tracked_samples": 4},
    ]),
    ("trainer.save_learner_logprobs", [
        "trainer.save_rollouts_every_steps=0", "eval.before=false", "eval.after=false",
        {"trainer.save_learner_logprobs": True},
    ]),
    # Older rules of this kind.
    ("learner.warmup_fraction", ["learner.num_warmup_steps=3", "learner.warmup_fraction=0.1"]),
    ("trainer.total_steps", ["trainer.total_epochs=1", "trainer.total_steps=5"]),
    ("rollout.device", [
        "rollout.placement=disaggregated", "rollout.launch.devices=[cpu]", "rollout.device=cpu",
    ]),
    ("reward.function", ["reward.functions={right: {function: exact}}", "reward.function=exact"]),
)  # fmt: skip
"""A setting whose place another one takes, and settings under which it does. A mapping is a later layer, such as Python
code over a recipe."""

SANDBOX = {
    "isolation": "namespaces", "memory_mib": 300, "cpu_s": 5.0, "timeout_s": 5.0, "max_processes": 8,
    "max_file_mib": 8, "max_output_kib": 8, "max_concurrent": 1, "preload": ["json"],
}  # fmt: skip
"""The settings of the sandbox, which the plain run does not use: it must say so."""


@contextmanager
def recorded(found: set[str], *, only_changed: bool = False) -> Iterator[None]:
    """Add the keys of all settings that code outside the checks reads; or only if they differ from the default."""
    keys: dict[tuple[type, str], dict[str, Any]] = {}
    for key, setting in settings(Config).items():
        keys.setdefault((setting.owner, setting.field.name), {})[key] = _plain(setting.default())
    owners = {owner for owner, _ in keys}

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if (type(self), name) in keys:
            path = Path(sys._getframe(1).f_code.co_filename)
            # Copying a record and comparing two are not uses: dataclasses.replace, and methods without a file.
            is_ours = path.is_relative_to(PACKAGE) and path.parent != PACKAGE / "config"
            if is_ours or (path.parent == PACKAGE / "config" and path.name in READERS):
                defaults = keys[type(self), name]
                found.update(key for key in defaults if not only_changed or _plain(value) != defaults[key])
        return value

    for owner in owners:
        owner.__getattribute__ = read
    try:
        yield
    finally:
        for owner in owners:
            del owner.__getattribute__


def run_with(found: set[str], root: Path, **sections: Any) -> list[str]:
    """Train a run. Returns what it said about settings without an effect."""
    with recorded(found):
        result = train(model="tiny:qwen3", progress=False, run={"root": str(root)}, **sections)
    notices: list[str] = json.loads((result.path / "status.json").read_text())["notices"]
    return notices


def other_values(key: str) -> Iterator[Any]:
    """Values of a setting that are allowed for it alone and differ from its value in the plain run."""
    setting = settings(Config)[key]
    hint, default = setting.hint, setting.default()
    while get_origin(hint) in (Annotated, types.UnionType, Union):
        hint = get_args(hint)[0]
    if default is None:
        default = 1
    if get_origin(hint) is Literal:
        yield from (choice for choice in get_args(hint) if choice != default)
    elif hint is bool:
        yield not default
    elif hint is int:
        yield from (default + 1, default * 2, 2, 2**20)
    elif hint is float:
        yield from (default / 2, default + 0.25, 0.5, 0.25)
    elif hint is str:
        yield from ("cpu", "some", "a.py:b", "http://127.0.0.1:1")
    elif get_origin(hint) is tuple and get_origin(get_args(hint)[0]) is Literal:
        yield from ([choice] for choice in get_args(get_args(hint)[0]) if (choice,) != default)
    elif get_origin(hint) is Mapping:
        yield from ({"some": {"function": "exact"}} if key == "reward.functions" else {"some": 1}, {"some": "1"})
    else:
        yield from (["some"], ["http://127.0.0.1:1"], ["cpu"], [3], ["a.py:b"])


def is_told(key: str) -> bool:
    """Whether a run that would ignore the setting is refused because nothing reads it, or says so when it starts.

    A refusal for another reason, such as a value that is too large, tells nothing.
    """
    for value in other_values(key):
        try:
            loaded = load_config(None, [PLAIN_RUN, {key: value}])
        except ConfigError as error:
            reasons = ("nothing reads this", SAID_OTHERWISE.get(key, "nothing reads this"))
            told = (each for each in error.problems if each.startswith(f"{key} = ") and "(Python)" in each)
            if any(reason in each for each in told for reason in reasons) and not is_wrong_alone(key, value):
                return True
            continue
        notices = config_notices(loaded.config, loaded.given, "cpu")
        if any(each.subject.startswith(f"{key} = ") and "has no effect" in each.text for each in notices):
            return True
    return False


def is_wrong_alone(key: str, value: Any) -> bool:
    """Whether the value does not even fit the type of the setting."""
    from headwater.config.convert import Converter
    from headwater.config.python_values import tree_of

    converter = Converter(Config)
    converter.build(tree_of({key: value}, 0, []))
    return bool(converter.problems)


def changed_in(tree: ast.Module) -> set[str]:
    """The settings that a test file sets to another value than the default.

    They are written ``"full.key=value"``, ``"section={name: value}"`` or ``{"full.key": value}``; or ``name=value`` and
    ``{"name": value}`` with a literal, if only one setting has that name, or one of the class that is called.
    """
    all_settings = settings(Config)
    owners: dict[str, list[str]] = {}
    for key, setting in all_settings.items():
        name = key.rpartition(".")[2]
        owners.setdefault(name, []).append(key)
        owners.setdefault(f"{setting.owner.__name__}.{name}", []).append(key)
    named = {name: keys[0] for name, keys in owners.items() if len(keys) == 1} | {key: key for key in all_settings}
    found = set()

    def note(name: str, value: Any) -> None:
        if name in named and _plain(value) != _plain(all_settings[named[name]].default()):
            found.add(named[name])

    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        pairs: list[tuple[object, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(each.arg, each.value) for each in node.keywords]
            pairs += [(f"{ast.unparse(node.func)}.{each.arg}", each.value) for each in node.keywords]
        elif isinstance(node, ast.Dict):
            pairs = [
                (key.value, value)
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for name, value in _overrides(node.value):
                if "." in name:
                    note(name, value)
        for name, value in pairs:
            with suppress(ValueError):  # not a literal
                note(str(name), ast.literal_eval(value))
    return found


def _overrides(text: str) -> Iterator[tuple[str, Any]]:
    """``a.b={c: 1}`` is ``a.b.c`` and 1. In the first part of an f-string, the value is incomplete, and stays text."""
    if not (match := re.fullmatch(r"([\w.]+)=(.*)", text, re.DOTALL)):
        return
    key, value = match[1], match[2]
    with suppress(yaml.YAMLError):
        value = yaml.safe_load(value)
    yield key, value
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{key}.{name}", inner


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_every_setting_is_read_or_refused(tmp_path):
    found: set[str] = set()
    notices = run_with(found, tmp_path, **PLAIN_RUN, sandbox=SANDBOX)
    assert {"run.seed", "rollout.max_new_tokens", "learner.learning_rate"} <= found
    assert not any(key.startswith(("critic.", "sandbox.")) and key != "critic.enabled" for key in found)
    told = [key for key in settings(Config) if any(notice.startswith(f"{key} = ") for notice in notices)]
    assert set(told) == {f"sandbox.{name}" for name in SANDBOX}
    assert len(told) == len([key for key in settings(Config) if key.startswith("sandbox.")])
    # What the plain run does not read must be refused there, even if a richer run reads it.
    ignored = [key for key in settings(Config) if key not in found and key not in told and not is_told(key)]
    assert not ignored, f"settings that are ignored without a word: {ignored}"
    run_with(found, tmp_path, **RICH_RUN)
    unread = {key for key in settings(Config) if key not in found}
    assert unread == {key for keys in READ_ELSEWHERE.values() for key in keys}


def test_a_setting_whose_place_another_takes_is_refused_beside_it():
    for key, given in SHADOWED:
        with pytest.raises(ConfigError) as refused:
            load_config(None, given)
        (problem,) = (each for each in refused.value.problems if each.startswith(f"{key} = "))
        others = {name for each in given for name in ([each.partition("=")[0]] if isinstance(each, str) else each)}
        assert any(other in problem for other in others - {key}), f"{problem}: the other setting is named"
        assert re.search("; .*(remove|set|use)", problem), f"{problem}: there is a remedy"
        # Each of the two is accepted alone.
        rest = [each for each in given if not isinstance(each, dict) and not each.startswith(f"{key}=")]
        load_config(None, rest)


def test_the_command_line_may_contradict_a_recipe_and_resolved_recipes_load_again(tmp_path):
    recipe = tmp_path / "exact.yaml"
    recipe.write_text("engine: {deterministic: false}\nlearner: {join_projections: true, fused_layers: true}\n")
    loaded = load_config(recipe, ["run.deterministic=true", "learner.compile=true"])
    assert loaded.config.engine.deterministic
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(loaded.config))
    assert load_config(resolved).config == loaded.config
    with pytest.raises(ConfigError, match=r"engine\.deterministic = false \(command line\): nothing reads this"):
        load_config(resolved, ["engine.deterministic=false"])


def test_what_is_read_elsewhere_is_set_there():
    for file, keys in READ_ELSEWHERE.items():
        found = changed_in(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        missing = [key for key in keys if key not in found]
        assert not missing, f"{file} does not set {missing} to anything but the default"


READ_BY_TESTS = """
import json, sys, pytest
from integration.test_every_setting_is_read import recorded

found = set()
with recorded(found, only_changed=True):
    code = pytest.main([*sys.argv[2:], "--numprocesses=0", "-p", "no:cacheprovider"])
with open(sys.argv[1], "w") as file:
    json.dump(sorted(found), file)
sys.exit(code)
"""


@pytest.mark.slow
def test_what_is_read_elsewhere_is_read_with_another_value(tmp_path):
    places = [f"{ROOT}/{name}" for name in ("src", "tests", "tests/integration", "tests/unit")]
    ours = ("PYTEST_XDIST_WORKER", "HEADWATER_TEST_SESSION")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-c", READ_BY_TESTS, tmp_path / "found.json", *READ_ELSEWHERE],
        cwd=ROOT, env={**environment, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True, text=True, timeout=PROCESS_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    keys = {key for each in READ_ELSEWHERE.values() for key in each}
    unread = keys - NOT_SEEN - set(json.loads((tmp_path / "found.json").read_text()))
    assert not unread, f"the tests pass, and nothing has read a changed {sorted(unread)}"


def test_a_setting_is_found_where_it_is_changed():
    found = changed_in(
        ast.parse(
            """
def test():
    \"\"\"sandbox.cpu_s=1\"\"\"  # a docstring sets nothing
    use(memory_mib=64, timeout_s=2.0, labels={"zone": "b"}, max_processes=32), SandboxConfig(max_concurrent=3)
    load("rollout.device=cpu", "rollout.max_new_tokens=64", "cluster.tools={num_actors: 7}", {"run.seed": 1})
"""
        )
    )
    assert {"sandbox.memory_mib", "rollout.device", "cluster.tools.num_actors", "run.seed"} <= found
    assert "sandbox.max_concurrent" in found, "the class tells which of several it is"
    assert not {"sandbox.cpu_s", "sandbox.max_processes", "cluster.tools.labels", "sandbox.timeout_s"} & found
