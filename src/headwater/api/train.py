"""``train`` and ``Trainer``: train a model from Python.

result = train("quickstart", data=rows, reward=correct, trainer={"total_steps": 20})
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from headwater.api import launch
from headwater.api.engine import Completion, Engine, Message, Prompts
from headwater.config import schema
from headwater.config.builtin import split_arguments
from headwater.config.extension_checks import START_CHECKS
from headwater.config.keys import settings, value_at
from headwater.config.load import load_config
from headwater.config.python_values import changed
from headwater.core.errors import ConfigError, HeadwaterError, RunError
from headwater.core.registry import EXTENSION_PREFIX
from headwater.observe.run_directory import RunDirectory
from headwater.trainer.callbacks import Callback, StepFunction, StopTraining

Layer = str | os.PathLike[str] | Mapping[str, Any] | schema.Config
"""A recipe by name or path, ``key=value``, a dict of settings, or another config."""
RewardFunction = Callable[..., Any]
Callbacks = Sequence[Callback | Callable[[int, Mapping[str, float]], object]]


class Config(schema.Config):
    """All settings of a run, checked together.

        Config("quickstart", trainer={"total_steps": 20})
        Config("quickstart", "dapo", "trainer.total_steps=20")
        Config({"model.path": "smollm2", "learner": {"learning_rate": 1e-5}})
        Config(base, rollout={"temperature": 0.7})

    Recipes are merged first, in order, then the other arguments in order, then the sections given by keyword. Where a
    recipe has the name of a function, a class or a source of data, the object itself may be given. ``ConfigError``
    reports all problems at once.
    """

    given: frozenset[str]
    """The settings that were given. All others have their defaults."""

    def __init__(self, *layers: Layer, **sections: Any) -> None:
        recipes: list[str] = []
        overrides: list[str | Mapping[str, Any]] = []
        for layer in layers:
            if isinstance(layer, Config):
                recipes += layer._recipes
                overrides += layer._overrides
            elif isinstance(layer, schema.Config):
                overrides.append(changed(layer))
            elif isinstance(layer, Mapping):
                overrides.append(layer)
            elif isinstance(layer, str):
                names, values = split_arguments([layer])
                recipes += names
                overrides += values
            else:
                recipes.append(os.fspath(layer))
        if sections:
            overrides.append(sections)
        loaded = load_config(recipes, overrides)
        values_of = {field.name: getattr(loaded.config, field.name) for field in fields(schema.Config)}
        given = loaded.given & settings(schema.Config).keys()
        for name, value in {**values_of, "given": given, "_recipes": recipes, "_overrides": overrides}.items():
            object.__setattr__(self, name, value)

    _recipes: list[str]
    _overrides: list[str | Mapping[str, Any]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recipes": [], "_overrides": [self.given_values]}  # without objects of this process

    @property
    def given_values(self) -> dict[str, Any]:
        """What was given, by dotted key."""
        return {key: value_at(self, key) for key in sorted(self.given)}

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={value_at(self, key)!r}" for key in sorted(self.given))
        return f"Config({shown})"


def train(
    *layers: Layer,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    data: Any = None,
    eval_data: Any = None,
    reward: str | RewardFunction | Mapping[str, Any] | Sequence[RewardFunction] | None = None,
    workflow: Any = None,
    tools: Any = None,
    callbacks: Callbacks = (),
    resume: str | os.PathLike[str] | None = None,
    step: int | None = None,
    progress: bool = True,
    **sections: Any,
) -> Result:
    """Train a model, and return its metrics and where it is.

    ``layers`` and ``sections`` are those of ``Config``: names of recipes, ``key=value``, dicts. The other arguments
    are short for settings, and take Python objects:

    - ``model``: ``model.path``.
    - ``data``, ``eval_data``: ``data.train`` and ``data.eval``: a list of dicts, a ``datasets.Dataset``, a
      ``DataFrame``, a function ``rows(split, num_rows, seed)``, the name of a task, file or dataset, or several of
      these in a list.
    - ``reward``: a function, several in a list or a dict (``{"correct": f, "short": {"function": g, "weight": 0.2}}``),
      or a name. A function of a module is called in worker processes, any other function in this process.
    - ``workflow``: an ``async def workflow(episode)``, or a class or object with ``async def run(self, episode)``.
    - ``tools``: functions with type hints and a docstring, tool classes or objects, or names.
    - ``callbacks``: ``Callback`` objects, or functions of the step and its metrics.
    - ``resume``: the directory of a run to continue, with the same objects; ``step`` chooses the checkpoint.
    - ``progress``: whether to print the progress.

    ``model``, ``data``, ``reward`` and ``tools`` may also be dicts with the settings of the section of that name.

    An interrupt (Ctrl-C, or the stop button of a notebook) saves a checkpoint and returns a result whose
    ``is_finished`` is false. Started by torchrun, only rank 0 returns.
    """
    trainer = Trainer(
        *layers,
        model=model,
        data=data,
        eval_data=eval_data,
        reward=reward,
        workflow=workflow,
        tools=tools,
        callbacks=callbacks,
        progress=progress,
        **sections,
    )
    return trainer.train(resume=resume, step=step)


class Trainer:
    """A run that is configured and checked, but not started. The arguments are those of ``train``.

    trainer = Trainer("quickstart", reward=correct)
    trainer.config.rollout.num_samples_per_prompt
    result = trainer.train()
    """

    def __init__(
        self,
        *layers: Layer,
        model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        data: Any = None,
        eval_data: Any = None,
        reward: str | RewardFunction | Mapping[str, Any] | Sequence[RewardFunction] | None = None,
        workflow: Any = None,
        tools: Any = None,
        callbacks: Callbacks = (),
        progress: bool = True,
        **sections: Any,
    ) -> None:
        arguments = {
            **_section("model", model, "path"),
            **_section("data", data, "train"),
            "data.eval": eval_data,
            "rollout.workflow": "tool_agent" if workflow is None and tools is not None else workflow,
            **_section("tools", tools, "use"),
            **_reward(reward),
        }
        given = {key: value for key, value in arguments.items() if value is not None}
        self.config = Config(*layers, *([given] if given else []), **sections)
        self._progress = progress
        self._wants_stop = threading.Event()
        self._callbacks = [*map(_as_callback, callbacks), StepFunction(self._stop_if_wanted)]

    def train(self, *, resume: str | os.PathLike[str] | None = None, step: int | None = None) -> Result:
        """Train to the last step. ``resume`` continues a run with the settings of this object."""
        if step is not None and resume is None:
            raise HeadwaterError(f"step = {step}: requires resume, the directory of a run")
        return self._run(self.config, resume, step)

    def evaluate(self) -> Result:
        """Answer the held-out prompts with the model as it is, and train nothing.

        The result has one record in ``evaluations``, and the run directory has the answers.
        """
        return self._run(Config(self.config, {"eval.only": True}), None, None)

    def _run(self, config: Config, resume: str | os.PathLike[str] | None, step: int | None) -> Result:
        _refuse_while_importing()
        if launch.is_helper():
            launch.serve_rank()
            sys.exit(0)  # only rank 0 has a result
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it would print warnings after a fork
        self._wants_stop.clear()
        display = None if self._progress else _silent()
        if resume is None:
            _check_files(config)
            plain = schema.Config(**{each.name: getattr(config, each.name) for each in fields(schema.Config)})
            ended = launch.start(plain, config.given, callbacks=self._callbacks, display=display)
        else:
            given = [config.given_values]
            ended = launch.resume(os.fspath(resume), step, given, callbacks=self._callbacks, display=display)
        return Result(ended.run.path.absolute(), ended.is_finished)

    def stop(self) -> None:
        """End training after the current step, with a checkpoint. Call it from a callback or from another thread."""
        self._wants_stop.set()

    def _stop_if_wanted(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._wants_stop.is_set():
            raise StopTraining("stop() was called")


def _check_files(config: Config) -> None:
    """Raise before anything is loaded if files are missing, or if no data to train or evaluate on is given."""
    named = {"data.train", "data.dataset", *(("data.eval",) if config.eval.only else ())}
    if not named & config.given:
        raise ConfigError(
            ["data: is missing; give a list of dicts, a file or a task, for example data=rows, or the name of a recipe"]
        )
    if problems := [clash.line(config, {}) for check in START_CHECKS for clash in check(config, {})]:
        raise ConfigError(problems)


def _section(name: str, value: Any, key: str) -> dict[str, Any]:
    """An argument with the name of a section is the setting ``key`` of it, or a dict with settings of the section."""
    known = {field.name for field in fields(getattr(schema.Config(), name))}
    if isinstance(value, Mapping) and value and known.issuperset(value):
        return {f"{name}.{field}": each for field, each in value.items()}
    if name == "tools" and value is not None and not isinstance(value, (list, tuple)):
        value = [value]
    return {f"{name}.{key}": value}


def _reward(reward: Any) -> dict[str, Any]:
    if isinstance(reward, (list, tuple)):
        reward = {getattr(each, "__name__", type(each).__name__): each for each in reward}
    section = _section("reward", reward, "function")
    if isinstance(reward, Mapping) and "reward.function" in section and section["reward.function"] is reward:
        parts = {name: part if isinstance(part, Mapping) else {"function": part} for name, part in reward.items()}
        return {"reward.functions": parts}
    return section


def _as_callback(callback: Any) -> Callback:
    if isinstance(callback, Callback):
        return callback
    if callable(callback) and not isinstance(callback, type):
        return StepFunction(callback)
    raise ConfigError([f"callbacks: {callback!r} is not a Callback object, nor a function of the step and its metrics"])


def _refuse_while_importing() -> None:
    """A worker process that imports a script for its reward function must not start the run of the script."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(EXTENSION_PREFIX) and frame.f_code.co_name == "<module>":
            raise HeadwaterError(
                f"{frame.f_code.co_filename}: calls train() while it is imported for one of its functions; put the "
                "call below: if __name__ == '__main__':"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


def _silent() -> Any:
    from rich.console import Console

    from headwater.observe.progress import Display

    return Display(Console(quiet=True))


@dataclass(frozen=True)
class Result:
    """``Result(Path("runs/quickstart"))`` also reads a run that ended earlier."""

    path: Path
    """The run directory."""
    is_finished: bool = True
    """Whether training ended by itself: false after an interrupt. Then ``train(..., resume=result.path)`` continues."""

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per training step, for example for ``pandas.DataFrame(result.metrics)``."""
        return self._records("train")

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """One dict per evaluation on held-out prompts."""
        return self._records("eval")

    @property
    def step(self) -> int:
        """Training steps done."""
        return max((record["step"] for record in self.metrics), default=0)

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        run = RunDirectory(self.path)
        if not (steps := run.checkpoint_steps()):
            raise RunError(f"{self.path}: has no checkpoint")
        return run.checkpoint(steps[-1])

    @property
    def model_path(self) -> Path:
        """The trained model, a folder that ``transformers`` and inference servers load."""
        return self.checkpoint / "model"

    @overload
    def generate(self, prompts: str, **sampling: Any) -> Completion: ...

    @overload
    def generate(self, prompts: Sequence[str], **sampling: Any) -> list[Completion]: ...

    @overload
    def generate(self, prompts: Prompts, **sampling: Any) -> Completion | list[Completion]: ...

    def generate(self, prompts: Prompts, **sampling: Any) -> Completion | list[Completion]:
        """Continue text as it is; see ``Engine.generate``. Make an ``Engine`` for several calls."""
        with Engine(self.model_path) as engine:
            return engine.generate(prompts, **sampling)

    @overload
    def chat(self, messages: str | Sequence[Message], **sampling: Any) -> Completion: ...

    @overload
    def chat(self, messages: Sequence[str] | Sequence[Sequence[Message]], **sampling: Any) -> list[Completion]: ...

    def chat(self, messages: Any, **sampling: Any) -> Completion | list[Completion]:
        """The trained model's reply to the text of a user or to a chat, as in training; see ``Engine.chat``."""
        with Engine(self.model_path) as engine:
            replies: Completion | list[Completion] = engine.chat(messages, **sampling)
            return replies

    def _records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in RunDirectory(self.path).read_metrics() if record["kind"] == kind]

    def __repr__(self) -> str:
        rewards = [f"{record['reward/mean']:.3f}" for record in self.evaluations]
        shown = f", held-out reward {rewards[0]} → {rewards[-1]}" if rewards else ""
        return f"Result({str(self.path)!r}, {self.step} steps{shown})"
