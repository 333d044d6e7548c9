"""Prompts from tasks, files and dataset objects, rendered with the model's chat template.

    dataset = RLHFDataset(["data/train.parquet"], config.data, tokenizer)
    dataset[0].tokens

A row is read, rendered and tokenised on access. If ``data.truncation`` is ``filter`` or ``error``, every row is also
built once at construction, so an invalid row stops the run before it starts.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from headwater.config.paths import is_file
from headwater.config.schema import DataConfig
from headwater.core.errors import DataError
from headwater.core.media import MediaProcessor
from headwater.core.protocols import Tokenizer
from headwater.core.records import Prompt
from headwater.data.digest import row_digest
from headwater.data.measure import choose_num_workers, measure_lengths
from headwater.data.prompt_builder import PromptBuilder, ToolsOfRow
from headwater.data.row_store import PlacedRow, RowStore, SupportsRows
from headwater.data.sampler import DataPart
from headwater.data.sources import SourceSettings, open_source, task_labels
from headwater.data.tasks import Split
from headwater.data.videos import evenly

if TYPE_CHECKING:
    from headwater.core.data_proto import DataProto

_NUM_ROWS_TO_JUDGE = 8


class RLHFDataset:
    """The rows of all sources, one source after the other, without the rows that are filtered out."""

    def __init__(
        self,
        sources: Sequence[str | SupportsRows],
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        split: Split = "train",
        seed: int = 0,
        num_rows: int | None = None,
        processor: MediaProcessor | None = None,
        tools: ToolsOfRow | None = None,
    ) -> None:
        """``num_rows`` and ``seed`` apply to tasks, which generate rows; files and dataset objects are used whole.

        ``tools`` returns the schemas of the tools that a row offers to the model.
        """
        self._config = config
        self._split = split
        self._builder = PromptBuilder(config, tokenizer, processor, tools)
        self._sources = [SourceSettings.of(source, config) for source in sources]
        opened = _open_all(sources, self._sources, config, split, seed, num_rows)
        self._stores = [store for stores in opened for store in stores]
        self._owners = [number for number, stores in enumerate(opened) for _ in stores]
        """The source of each store."""
        self._names = _unique_names(store.name for store in self._stores)
        self._labels = _unique_names(
            _label(given, stores[0].name) for given, stores in zip(self._sources, opened, strict=True)
        )
        self._starts = [0, *itertools.accumulate(len(store) for store in self._stores)]
        ends = itertools.accumulate(sum(map(len, stores)) for stores in opened)
        self._ends = list(ends)
        """The number of the row after the last one of each source."""
        self.longest_prompt = config.max_prompt_tokens
        """Tokens of the longest prompt. If prompts are cut and not measured: the length they may have."""
        self._chosen = _choose_rows(self._rows_of_sources(seed), config, split, seed)
        self._kept = self._check_lengths()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        placed = self._read_row(self._kept[index])
        prompt = self._builder.build(placed)
        limit, overlong = self._config.max_prompt_tokens, self._config.truncation
        if len(prompt.tokens) <= limit:
            return prompt
        if overlong == "filter" or overlong == "error":
            raise self._too_long(placed, len(prompt.tokens), "was shorter when the dataset was built; start again")
        if prompt.media:
            # A cut inside the tokens of an image would leave the model with part of an image.
            raise self._too_long(placed, len(prompt.tokens), "has images or videos, which cannot be cut")
        return dataclasses.replace(prompt, tokens=cut_tokens(prompt.tokens, limit, overlong))

    def uid(self, index: int) -> str:
        """The uid of the prompt of a row, also if the row cannot be read."""
        return self._uid(self._kept[index])

    def _uid(self, number: int) -> str:
        at = bisect.bisect_right(self._starts, number) - 1
        return f"{self._names[at]}/{self._split}/{number - self._starts[at]}"

    @property
    def num_filtered(self) -> int:
        """Rows left out because their prompt is longer than ``data.max_prompt_tokens``."""
        return len(self._chosen) - len(self._kept)

    @property
    def parts(self) -> tuple[DataPart, ...]:
        """Which rows come from which source."""
        is_mixed = self._split == "train" and any(each.weight is not None for each in self._sources)
        stops = [bisect.bisect_left(self._kept, end) for end in self._ends]
        return tuple(
            DataPart(label, start, stop, (given.weight or 1.0) if is_mixed else None)
            for label, given, start, stop in zip(self._labels, self._sources, [0, *stops], stops, strict=False)
        )

    def row_digest(self, index: int) -> int:
        """A number that depends on the row as its source has it, before it is rendered."""
        # A class that derives from this one may have another length.
        row = self._read_row(self._kept[index % len(self._kept)]).row
        return row_digest(row, (self._config.image_key, self._config.video_key))

    def _rows_of_sources(self, seed: int) -> Sequence[int]:
        """The numbers of the rows that ``max_rows`` of each source leaves."""
        if not any(each.max_rows for each in self._sources):
            return range(self._starts[-1])
        rows: list[int] = []
        for number, (given, start, end) in enumerate(zip(self._sources, [0, *self._ends], self._ends, strict=False)):
            key = f"{seed}/{self._split}/{number}"
            rows += _limited(range(start, end), given.max_rows, key if self._config.shuffle else "")
        return rows

    def _read_row(self, number: int) -> PlacedRow:
        """Row ``number``, counted over all sources."""
        at = bisect.bisect_right(self._starts, number) - 1
        store, row = self._stores[at], number - self._starts[at]
        given = self._sources[self._owners[at]]
        return PlacedRow(
            row=_renamed(store[row], given.columns, store.place(row)) if given.columns else store[row],
            place=store.place(row),
            uid=self._uid(number),
            source_name=given.data_source or store.name,
            folder=store.folder,
            system_prompt=given.system_prompt,
            source=self._labels[self._owners[at]],
        )

    def _check_lengths(self) -> Sequence[int]:
        """The numbers of the rows to use."""
        num_rows, limit, overlong = len(self._chosen), self._config.max_prompt_tokens, self._config.truncation
        if overlong not in ("filter", "error"):
            return self._chosen
        num_workers = choose_num_workers(self._config.num_filter_workers, num_rows, self.has_media)
        lengths = measure_lengths(
            lambda place: self._read_row(self._chosen[place]), num_rows, self._builder, num_workers, self.has_media
        )
        kept = [number for number, length in zip(self._chosen, lengths, strict=True) if length <= limit]
        if overlong == "error" and len(kept) < num_rows:
            first = next(number for number, length in enumerate(lengths) if length > limit)
            count = f"{num_rows - len(kept)} of {num_rows} rows are too long"
            raise self._too_long(self._read_row(self._chosen[first]), lengths[first], f"stops the run ({count})")
        if not kept:
            raise DataError(
                f"{_names(self._stores)}: all {num_rows} rows are longer than data.max_prompt_tokens = {limit} "
                f"(the shortest has {min(lengths)}); raise it, or set data.truncation to left, right or middle"
            )
        self.longest_prompt = max(length for length in lengths if length <= limit)
        return kept

    @functools.cached_property
    def has_media(self) -> bool:
        """Whether a source seems to have images or videos, judged by a few of its rows."""
        if self._builder.processor is None:
            return False
        for start, end in itertools.pairwise(self._starts):
            first, stop = (bisect.bisect_left(self._chosen, number) for number in (start, end))
            for place in evenly(stop - first, _NUM_ROWS_TO_JUDGE):
                try:
                    placed = self._read_row(self._chosen[first + place])
                except DataError:  # measuring raises it, after the errors of earlier rows
                    continue
                if self._builder.holds_media(placed.row):
                    return True
        return False

    def _too_long(self, placed: PlacedRow, length: int, what: str) -> DataError:
        return DataError(
            f"{placed.place}: prompt of {length} tokens, data.max_prompt_tokens = {self._config.max_prompt_tokens}, "
            f"data.truncation = {self._config.truncation}: {what}; raise max_prompt_tokens, or set truncation to filter"
        )


def _choose_rows(rows: Sequence[int], config: DataConfig, split: Split, seed: int) -> Sequence[int]:
    """The rows that ``data.max_train_rows`` or ``data.max_eval_rows`` leaves, in the order of the sources."""
    limit = config.max_train_rows if split == "train" else config.max_eval_rows
    return _limited(rows, limit, f"{seed}/{split}" if config.shuffle else "")


def _limited(rows: Sequence[int], limit: int, key: str) -> Sequence[int]:
    """At most ``limit`` rows: a random choice that depends on ``key``, or the first ones if it is empty."""
    if not 0 < limit < len(rows):
        return rows
    return sorted(random.Random(key).sample(rows, limit)) if key else rows[:limit]


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str], place: str) -> dict[str, Any]:
    """A row with the columns under the names that Headwater reads, and its other columns."""
    if missing := [column for column in columns.values() if column not in row]:
        raise DataError(f"{place}: no column {missing[0]!r}, which data.sources names; the row has {', '.join(row)}")
    taken = set(columns.values())
    others = {name: value for name, value in row.items() if name not in taken}
    return {**others, **{name: row[column] for name, column in columns.items()}}


def _label(given: SourceSettings, store_name: str) -> str:
    """The name of a source in metrics."""
    return given.name if given.name and not is_file(given.name) else store_name


def cut_tokens(tokens: tuple[int, ...], limit: int, cut: Literal["left", "right", "middle"]) -> tuple[int, ...]:
    """At most ``limit`` tokens. ``cut`` names the part that is removed."""
    if len(tokens) <= limit:
        return tokens
    if cut == "left":
        return tokens[-limit:]
    if cut == "right":
        return tokens[:limit]
    num_head = limit // 2
    return tokens[:num_head] + tokens[len(tokens) - (limit - num_head) :]


def collate(prompts: Sequence[Prompt], pad_token_id: int) -> DataProto:
    """Prompts as one batch, padded on the left so that all responses start in the same column.

    The tensors are ``input_ids``, ``attention_mask`` and ``position_ids``. Every other field of ``Prompt`` is an object
    column of the same name.
    """
    import torch

    from headwater.core.data_proto import DataProto

    if not prompts:
        raise DataError("collate: got no prompts; a batch needs at least one")
    lengths = torch.tensor([len(prompt.tokens) for prompt in prompts])
    width = int(lengths.max())
    columns = torch.arange(width)
    starts = (width - lengths).unsqueeze(1)
    attention_mask = (columns >= starts).long()
    input_ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.long)
    input_ids[attention_mask.bool()] = torch.tensor([token for prompt in prompts for token in prompt.tokens])
    names = [field.name for field in dataclasses.fields(Prompt) if field.name != "tokens"]
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (columns - starts).clamp(min=0),
        },
        non_tensors={name: [getattr(prompt, name) for prompt in prompts] for name in names},
    )


def is_read_by_threads(dataset: object) -> bool:
    """Whether its rows seem to have images or videos. A custom class may not expect several threads."""
    return type(dataset) is RLHFDataset and dataset.has_media


def _open_all(
    sources: Sequence[str | SupportsRows],
    given: Sequence[SourceSettings],
    config: DataConfig,
    split: Split,
    seed: int,
    num_rows: int | None,
) -> list[list[RowStore]]:
    """The stores of each source."""
    if isinstance(sources, str):
        raise DataError(f"sources = {sources!r}: must be a list; write [{sources!r}]")
    if not sources:
        raise DataError("no data sources; name a task or at least one file in data.train")
    if num_rows is None:
        num_rows = config.num_train_rows if split == "train" else config.num_eval_rows
    others = [SourceSettings.of(name, config) for name in (*config.train, *config.eval)]
    labels = task_labels(each.source for each in (*given, *others))
    stores = [
        open_source(each, split=split, num_rows=num_rows, seed=seed, task_args=config.task_args, labels=labels)
        for each in given
    ]
    if config.task_args and not labels:  # after opening, which reports a task whose name is misspelled
        raise DataError(f"data.task_args = {dict(config.task_args)!r}: no data source is a task; leave it out")
    return stores


def _unique_names(names: Iterable[str]) -> list[str]:
    """Two files with the same name must not share uids or metrics: the second ``train`` becomes ``train#2``."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique


def _names(stores: Sequence[RowStore]) -> str:
    return ", ".join(dict.fromkeys(store.name for store in stores))
