"""Loads the datasets that the config names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from headwater.config.schema import DataConfig
from headwater.core.errors import DataError, HeadwaterError
from headwater.core.protocols import Tokenizer
from headwater.core.records import Prompt
from headwater.core.registry import blaming, load_object
from headwater.data.prompt_builder import ToolsOfRow
from headwater.data.rlhf_dataset import RLHFDataset, is_read_by_threads
from headwater.data.sampler import DataPart
from headwater.data.sources import is_task
from headwater.data.tasks import Split

_NUM_READERS = 8


class PromptDataset(Protocol):
    """What training needs from a dataset.

    A custom class (``data.dataset``) is constructed with the keyword arguments of ``RLHFDataset``: sources, config,
    tokenizer, split, seed, num_rows, processor; and ``tools`` if the run has tools (see ``ToolsOfRow``).
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Prompt: ...


@runtime_checkable
class MeasuredDataset(PromptDataset, Protocol):
    """A dataset that has measured its prompts. A custom class may have these two attributes as well."""

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt. Without it, a run makes room for ``data.max_prompt_tokens``."""
        ...

    @property
    def num_filtered(self) -> int:
        """Rows that are left out because their prompt is too long. Reports show them."""
        ...


@runtime_checkable
class MixedDataset(PromptDataset, Protocol):
    """A dataset that knows which of its rows come from which source. A custom class may have this attribute as well."""

    @property
    def parts(self) -> Sequence[DataPart]:
        """All rows, in order. If a part has a weight, prompts are drawn by weight."""
        ...


@runtime_checkable
class DigestedDataset(PromptDataset, Protocol):
    """A dataset whose rows a resumed run compares with those of its checkpoint. A custom class may have this method as
    well; without it, only the number of rows is compared."""

    def row_digest(self, index: int, /) -> int:
        """A number that depends on the content of a row, and is the same in every process. Its lower 32 bits count."""
        ...


def load_dataset(
    config: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    seed: int,
    processor: Any = None,
    tools: ToolsOfRow | None = None,
) -> PromptDataset | None:
    """The train or eval prompts. None if there are no eval prompts: the data are files and ``data.eval`` is empty."""
    sources = sources_of(config, split)
    if not sources:
        return None
    arguments: dict[str, Any] = {
        "sources": sources,
        "config": config,
        "tokenizer": tokenizer,
        "split": split,
        "seed": seed,
        "num_rows": None,
        "processor": processor,
        **({} if tools is None else {"tools": tools}),
    }
    return _custom_dataset(config.dataset, arguments) if config.dataset else RLHFDataset(**arguments)


def prompts_of(dataset: PromptDataset, rows: Sequence[int]) -> list[Prompt]:
    """The prompts of these rows, in order. Images and videos are read by several threads."""
    if not is_read_by_threads(dataset):
        return [dataset[row] for row in rows]
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="headwater-rows") as readers:
        return list(readers.map(dataset.__getitem__, rows))


def readable_prompts(dataset: PromptDataset, rows: Iterable[int], *, skips_unreadable: bool) -> Iterator[Prompt]:
    """The prompts of these rows, which stand for others. If ``skips_unreadable``, rows that cannot be read are left
    out, unless none of them can be read."""
    first_error: DataError | None = None
    has_read = False
    for row in rows:
        try:
            prompt = dataset[row]
        except DataError as error:
            if not skips_unreadable:
                raise
            first_error = first_error or error
        else:
            has_read = True
            yield prompt
    if first_error is not None and not has_read:
        raise first_error


def sources_of(config: DataConfig, split: Split) -> list[str]:
    """The sources of a split. If ``data.eval`` is empty, the tasks in ``data.train`` provide held-out problems."""
    if split == "train":
        return list(config.train)
    return list(config.eval) or [
        name for name in config.train if is_task(config.sources.get(name, {}).get("source", name))
    ]


def _custom_dataset(path: str, arguments: dict[str, Any]) -> PromptDataset:
    label = f"data.dataset = {path!r}"
    with blaming(label):
        cls = load_object(path)
    if not callable(cls):
        raise DataError(f"{label}: is a {type(cls).__name__}; name a class")
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        names = ", ".join(arguments)
        raise DataError(f"{label}: {error}; it is constructed with the keyword arguments {names}") from error
    try:
        dataset: PromptDataset = cls(**arguments)
    except HeadwaterError:
        raise
    except Exception as error:  # a custom class may raise anything
        raise DataError(
            f"{label}: its constructor raised {type(error).__name__}: {error}; run with --debug to see where"
        ) from error
    for method in ("__len__", "__getitem__"):
        if not hasattr(dataset, method):
            raise DataError(f"{label}: has no {method}; a dataset has __len__ and __getitem__, which returns a Prompt")
    if len(dataset) == 0:
        raise DataError(f"{label}: has no rows; check data.train and data.eval")
    first: object = dataset[0]
    if not isinstance(first, Prompt):
        raise DataError(
            f"{label}: row 0 is a {type(first).__name__}; __getitem__ must return headwater.core.records.Prompt"
        )
    return dataset
