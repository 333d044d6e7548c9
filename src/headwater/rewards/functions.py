"""A scoring function: how it is found, what it receives, and how its result becomes a score.

A function receives what it names. These signatures work, and so does any selection of their names:

    def compute_score(data_source, solution_str, ground_truth, extra_info, **settings)              # one response
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **settings)          # lists
    def reward(prompts, completions, **columns)                                                     # lists

A function that has a parameter ``images`` or ``videos`` receives those of the conversation.

Both the process that trains and the reward workers use this file, so it imports nothing heavy.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

from headwater.core.errors import RewardFailed, UnknownName
from headwater.core.records import MAX_REWARD, Prompt, Score, is_reward
from headwater.core.registry import PythonObject, blaming, is_path, nearest
from headwater.rewards.scorers import SCORERS, is_quick, scorer_of

if TYPE_CHECKING:
    from headwater.core.records import ScorableEpisode  # slow to import

ScoreFunction = Callable[..., Any]

_DEFAULT_FUNCTION = "compute_score"
ROW_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What a function with ``**settings`` receives."""
BATCH_NAMES = ("prompts", "completions")
MEDIA_NAMES = ("images", "videos")
"""What the conversation shows: Pillow images, and videos as lists of these. A column of the same name comes first."""
_QUESTION = "question"
"""A column that every row has: the prompt's last user message, unless the data has a column of this name."""
PLURALS = {name: f"{name}s" for name in ROW_NAMES}
"""A function that names one of ``BATCH_NAMES`` or of these works on lists, and returns a list."""


class Scorable(Protocol):
    """A function that workers find by its path."""

    @property
    def path(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def is_async(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class RemoteFunction:
    """A function that this process has not loaded itself."""

    path: str
    settings: Mapping[str, Any]
    is_async: bool


@dataclass(frozen=True, eq=False)
class ScoringFunction:
    """A function, its settings, and the arguments that it takes."""

    function: ScoreFunction
    path: str
    """What ``SCORERS.resolve`` finds it by, in a worker as well; empty for an object that only this process has."""
    settings: Mapping[str, Any]
    """Keyword arguments that are the same for every response."""
    signature: Signature
    is_async: bool
    is_quick: bool
    """It takes microseconds, so it is called directly."""

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    @property
    def place(self) -> str:
        """Its name, and where it is defined."""
        return f"{self.name}{defined_at(self.function)}"

    @classmethod
    def of(cls, function: ScoreFunction, path: str, settings: Mapping[str, Any], setting: str) -> ScoringFunction:
        """``setting`` names the function in messages."""
        if path and not is_path(path):
            _check_settings(function, settings, setting)
        return cls(
            function,
            path,
            settings,
            read_signature(function, settings, setting),
            is_async=inspect.iscoroutinefunction(function),
            is_quick=is_quick(path),
        )

    @classmethod
    def named(cls, name: str, settings: Mapping[str, Any], key: str) -> ScoringFunction:
        """The function that the setting ``key`` names. A file without the name of a function provides compute_score."""
        setting = f"{key} = {name}"
        path = f"{name}:{_DEFAULT_FUNCTION}" if name.endswith(".py") else name
        with blaming(setting):
            try:
                found = SCORERS.resolve(path)
            except UnknownName as error:
                if path == name:
                    raise
                raise UnknownName(f"{error}; name the function as {name}:function") from error
        if isinstance(name, PythonObject):
            path = ""  # only this process has it
        if inspect.isclass(found) or not callable(found):
            what = "is a class" if inspect.isclass(found) else "not callable"
            raise RewardFailed(f"{setting}: {what}; name a function")
        return cls.of(found, path, settings, setting)

    @classmethod
    def of_row(cls, prompt: Prompt, settings: Mapping[str, Any]) -> ScoringFunction:
        """The built-in scorer that the row's ``data_source`` names."""
        try:
            name = scorer_of(prompt.data_source)
            return cls.of(SCORERS.resolve(name), name, settings, f"scorer {name}")
        except UnknownName as error:
            # A row without data_source has the name of its file or task, which is also the first part of its uid.
            is_default = prompt.uid.partition("/")[0].partition("#")[0] == prompt.data_source
            origin = ", the name of its file or task, which is the default for rows without one" if is_default else ""
            raise RewardFailed(
                f"row {prompt.uid}: no built-in scorer for data_source {prompt.data_source!r}{origin} ({error}); "
                "add a data_source to the rows that names a scorer, or set reward.function to your own compute_score",
                cause="no_scorer",
            ) from error

    def arguments(self, episode: ScorableEpisode) -> dict[str, Any]:
        """What the function takes of one episode, by the names of single values."""
        prompt, signature = episode.prompt, self.signature
        values: dict[str, Any] = {
            "data_source": prompt.data_source,
            "solution_str": episode.text,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        if signature.is_plain:
            return values
        if "messages" in signature.names:
            values["messages"] = [dict(message) for message in episode.messages]
        if not signature.names.isdisjoint(("prompts", "completions")):
            values["prompts"], values["completions"] = _as_conversation(episode)
        taken = {name: value for name, value in values.items() if name in signature.names}
        if signature.columns or signature.takes_rest:
            signature.check_row(prompt)
            rest = prompt.columns.keys() - {*values, "prompt"} if signature.takes_rest else frozenset()
            wanted = signature.columns | rest
            taken |= {name: value for name, value in prompt.columns.items() if name in wanted}
        if _QUESTION in signature.columns and taken.get(_QUESTION) is None:
            taken[_QUESTION] = _asked(prompt)
        for name in signature.columns.intersection(MEDIA_NAMES) - taken.keys():
            taken[name] = _shown(episode, name)
        return taken

    def one_call(self, episodes: Sequence[ScorableEpisode]) -> dict[str, Any]:
        """The arguments of one call. A function of lists receives one entry per episode."""
        if not self.signature.is_batched:
            (episode,) = episodes
            return self.arguments(episode)
        rows = [self.arguments(episode) for episode in episodes]
        plural, names = self.signature.plural, dict.fromkeys(name for row in rows for name in row)
        return {plural.get(name, name): [row.get(name) for row in rows] for name in names}


def _check_settings(function: ScoreFunction, settings: Mapping[str, Any], setting: str) -> None:
    """Raise ``RewardFailed`` if settings of a built-in scorer break the rules beside its types."""
    from headwater.config.arguments import broken_rules  # slow to import, and reward workers do not need it

    defaults = {name: each.default for name, each in inspect.signature(function).parameters.items()}
    for name, reason in broken_rules(get_type_hints(function, include_extras=True), defaults, settings):
        raise RewardFailed(f"{setting}: its setting {name} = {settings[name]!r}: {reason}", cause="bad_arguments")


def _shown(episode: ScorableEpisode, name: str) -> list[Any]:
    """The images or videos of the conversation. An answer that is scored alone has those of the prompt."""
    items = [each.content for each in getattr(episode, "media", episode.prompt.media)]
    if name == "images":
        return [content.images()[0] for content in items if content.kind == "image"]
    return [content.images() for content in items if content.kind == "video"]


def _asked(prompt: Prompt) -> str:
    """The text of the last user message of the prompt. Later ones, such as feedback, belong to the episode."""
    content = next((each.get("content") for each in reversed(prompt.messages) if each.get("role") == "user"), None)
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text", "")) for part in content)
    return "" if content is None else str(content)


def _as_conversation(episode: ScorableEpisode) -> tuple[Any, Any]:
    """Prompt and completion: text if the row's prompt is plain text, otherwise lists of messages."""
    plain = episode.prompt.columns.get("prompt")
    if isinstance(plain, str):
        return plain, episode.text
    messages = [dict(message) for message in episode.messages]
    start = len(episode.prompt.messages)
    return messages[:start], messages[start:]


def read_result(result: Any, count: int | None) -> list[Score]:
    """The scores in what a function returned: one, or with ``count`` a list of that many. Raises ``BadValue``."""
    if count is None:
        return [to_score(result)]
    wanted = "one completion; return a list with one number" if count == 1 else f"{count} responses; return as many"
    try:
        values = list(result) if not isinstance(result, (str, bytes, Mapping)) else None
    except TypeError:
        values = None
    if values is None or len(values) != count:
        shown = repr(result) if values is None else f"{len(values)} values"
        raise BadValue(f"returned {shown} for {wanted}")
    return [to_score(value) for value in values]


_SPENT = re.compile(r"(^|_)judge_(prompt_tokens|completion_tokens|cost|retries)$")
"""What ``llm_judge`` uses up. In a mixture, the name of the part comes first."""


def info_of_all(scores: Sequence[Score]) -> dict[str, Any]:
    """The info of the last of several scores of one episode, with what all of them together have used up."""
    info = dict(scores[-1].info)
    for name in filter(_SPENT.search, scores[-1].info):
        info[name] = sum(value for each in scores if isinstance(value := each.info.get(name), Real))
    return info


class BadValue(Exception):
    """What a function returned instead of a score, in words that follow its name."""


def to_score(result: Any) -> Score:
    """A score from a function's result: a finite number, or a dict with a finite number under ``score``."""
    if type(result) is float and is_reward(result):  # the usual case, without checks against abstract classes
        return Score(result)
    info: Mapping[str, Any] = {}
    value = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise BadValue(f"returned a dict without 'score'; its keys are {sorted(map(str, result))}")
        value = result["score"]
        info = {str(key): entry for key, entry in result.items() if key != "score"}
    if not isinstance(value, (Real, bool)):
        raise BadValue(f"returned {value!r}; return a finite number, or a dict with one under 'score'")
    if not is_reward(value):
        raise BadValue(f"returned {value!r}; return a finite number within ±{MAX_REWARD:g}")
    return Score(float(value), info)


@dataclass(frozen=True)
class Failure:
    """Why a call has no score. It can be sent between processes."""

    cause: str
    """One word, by which failures are counted."""
    text: str
    """The rest of a sentence that begins with the function and the row."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """What the call has used up; see ``RewardFailed.spent``."""


def failure_of(error: BaseException, function: ScoreFunction) -> Failure:
    """Describe an error that a function raised."""
    if isinstance(error, BadValue):
        return Failure("bad_value", str(error))
    if isinstance(error, RewardFailed):
        return Failure(error.cause, f"failed: {error}", error.spent)
    return Failure("raised", f"raised {type(error).__name__}: {error}{_raised_at(error, function)}")


def _raised_at(error: BaseException, function: ScoreFunction) -> str:
    """Where an error was raised: the last line of the function's own file, or else the last line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [each for each in frames if code is not None and each.filename == code.co_filename]
    return f" at {each.filename}:{each.lineno}" if (each := next(reversed(own or frames), None)) else ""


@dataclass(frozen=True)
class Signature:
    """Which values a scoring function receives."""

    names: frozenset[str]
    """The values of the episode that it takes: ``ROW_NAMES``, ``messages``, ``BATCH_NAMES``."""
    columns: frozenset[str] = frozenset()
    """Its parameters that are columns of the data."""
    required: tuple[str, ...] = ()
    """Those of ``columns`` that have no default and that a row may lack."""
    takes_rest: bool = False
    """Whether it receives all other columns of the row, too."""
    is_batched: bool = False
    """Whether values are lists, and the result as well."""
    plural: Mapping[str, str] = field(default_factory=dict)
    """The names under which it receives lists, where they differ: ``solution_str`` as ``solution_strs``."""
    where: str = ""
    """The setting, and where the function is defined."""
    is_plain: bool = field(init=False)
    """Whether it receives all of ``ROW_NAMES`` and nothing else."""

    def __post_init__(self) -> None:
        is_plain = self.names == {*ROW_NAMES} and not self.columns and not self.takes_rest
        object.__setattr__(self, "is_plain", is_plain)

    def check_row(self, prompt: Prompt) -> None:
        """Raise ``RewardFailed`` if the row lacks a column that the function requires."""
        missing = [name for name in self.required if name not in prompt.columns]
        if missing:
            known = [*ROW_NAMES, "messages", _QUESTION, *MEDIA_NAMES, *BATCH_NAMES, *prompt.columns]
            raise RewardFailed(
                f"{self.where}: nothing provides its parameter {missing[0]!r} for row {prompt.uid}; "
                f"{nearest(missing[0], known)}; rename it, give it a default, or set reward.function_args.{missing[0]}",
                cause="bad_arguments",
            )


def read_signature(function: Callable[..., Any], settings: Mapping[str, Any], setting: str) -> Signature:
    """``settings`` are ``reward.function_args``; ``setting`` names the function in messages."""
    where = f"{setting}{defined_at(function)}"
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return Signature(frozenset(ROW_NAMES), where=where)
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    takes_rest = any(each.kind is each.VAR_KEYWORD for each in parameters)
    nameless = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY and each.default is each.empty]
    if nameless:
        raise RewardFailed(f"{where}: its parameter {nameless[0]!r} cannot be given by name; remove the '/' after it")
    unknown = [name for name in settings if name not in named and not takes_rest]
    if unknown:
        hint = nearest(unknown[0], list(named))
        raise RewardFailed(f"reward.function_args.{unknown[0]}: {where} has no such parameter; {hint}")
    is_plural = not named.keys().isdisjoint(PLURALS.values())
    is_batched = is_plural or not named.keys().isdisjoint(BATCH_NAMES)
    plural = {name: many for name, many in PLURALS.items() if many in named or (is_plural and takes_rest)}
    provided = {*ROW_NAMES, "messages", *BATCH_NAMES}
    names = {name for name in named if name in provided} | plural.keys()
    if takes_rest and not is_plural:
        names |= {*(BATCH_NAMES if is_batched else ROW_NAMES)}
    columns = named.keys() - provided - settings.keys() - {*plural.values()}
    no_default = [name for name, each in named.items() if name in columns and each.default is each.empty]
    return Signature(
        names=frozenset(names - settings.keys()),
        columns=frozenset(columns),
        required=tuple(name for name in no_default if name not in (_QUESTION, *MEDIA_NAMES)),
        takes_rest=takes_rest and is_batched and not is_plural,
        is_batched=is_batched,
        plural=plural,
        where=where,
    )


def defined_at(function: Callable[..., Any]) -> str:
    """For example `` (reward.py:12)``; empty for a callable object."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
