"""One rollout, with all values of all its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.core.byte_cache import ByteCache
from headwater.dashboard.errors import not_found
from headwater.dashboard.pictures import media_of
from headwater.dashboard.plain_values import finite, floats, jsonable
from headwater.dashboard.rollout_files import OpenFile, RolloutFile, Source, parse_id
from headwater.dashboard.rollout_row import (
    MOST_CHARACTERS,
    ROW_COLUMNS,
    messages_of,
    parsed,
    response_length,
    row_of,
    text,
)
from headwater.dashboard.runs import Run
from headwater.dashboard.vocabulary import Vocabulary

VALUES = ("logprobs", "learner_logprobs", "advantages", "returns", "values", "reference_logprobs", "entropies")
"""Columns with one number per token. All but the first have values for trained tokens only."""
MOST_TOKENS = 20_000
_MOST_SEGMENTS = 5000
_TOKENS = ("tokens", "loss_mask", "versions", "prompt_length", "messages", "info", *VALUES)
_NOT_SAMPLED = -1
_KEPT_BYTES = 32 << 20
"""Rollouts that were looked at last are kept up to this size, so that paging through a long one reads it once. The
newest one is kept, however large it is."""
_MOST_KEPT = 64
_OF_TOKENS = ("advantages", "loss_mask")
_SHOWN = (*(name for name in ROW_COLUMNS if name not in _OF_TOKENS), "messages", "ground_truth", "info", "turn_rewards",
          "media")  # fmt: skip

Array = NDArray[Any]


@dataclass(frozen=True)
class Tokens:
    """The tokens of one rollout as arrays of the same length."""

    ids: Array
    mask: Array
    versions: Array
    prompt_length: int
    values: Mapping[str, Array]
    retokenised: Sequence[int] = ()
    """Places of tokens whose text is an earlier reply of the model. Found by the text, so it is a guess."""

    @classmethod
    def of(cls, row: Mapping[str, Any], vocabulary: Vocabulary) -> Tokens:
        ids = _ints(row.get("tokens"))
        size = len(ids)
        mask, versions = (
            _fitted(_ints(row.get(name)), size, missing) for name, missing in (("loss_mask", 0), ("versions", -1))
        )
        mask = (mask != 0).astype(np.int8)
        values = {}
        for name in VALUES:
            given = row.get(name)
            if given is not None and len(given) == size and (size or name == "logprobs"):
                values[name] = np.array(given, np.float32)
                values[name][(versions == _NOT_SAMPLED) if name == "logprobs" else (mask == 0)] = np.nan
        prompt_length = max(0, min(size, int(row.get("prompt_length") or 0)))
        return cls(ids, mask, versions, prompt_length, values, retokenised(row, ids[:prompt_length], vocabulary))

    @classmethod
    def read(cls, opened: OpenFile, row: int, vocabulary: Vocabulary) -> Tokens:
        """From a file. The columns of a long rollout are read one after the other, each as small as it is kept."""
        if not opened.is_large(row):
            return cls.of(opened.row(row, _TOKENS), vocabulary)
        columns = {name: _small(name, opened.row(row, (name,)).get(name)) for name in _TOKENS}
        made = cls.of(columns, vocabulary)
        pa.default_memory_pool().release_unused()
        return made

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.ids, self.mask, self.versions, *self.values.values()))

    @property
    def kinds(self) -> Array:
        """0 prompt, 1 trained, 2 sampled but not trained, 3 inserted."""
        sampled = self.versions != _NOT_SAMPLED
        kinds = np.where(self.mask != 0, np.int8(1), np.where(sampled, np.int8(2), np.int8(3)))
        kinds[: self.prompt_length] = np.where(sampled[: self.prompt_length], kinds[: self.prompt_length], 0)
        return kinds

    @property
    def turns(self) -> Array:
        """The turn of the model to which a token belongs; -1 outside. A turn is a run of sampled tokens."""
        sampled = self.versions != _NOT_SAMPLED
        begins = sampled & ~np.concatenate([[False], sampled[:-1]]) if len(sampled) else sampled
        return np.where(sampled, np.cumsum(begins, dtype=np.int32) - 1, np.int32(-1))

    @property
    def difference(self) -> Array | None:
        """Learner - engine, of trained tokens."""
        if "learner_logprobs" not in self.values or "logprobs" not in self.values:
            return None
        return self.values["learner_logprobs"] - self.values["logprobs"]


def _ints(given: Any) -> Array:
    """Four bytes each: neither a vocabulary nor a run has more tokens or versions. Never a view of what Arrow holds."""
    if given is None:
        return np.zeros(0, np.int32)
    array, limit = np.asarray(given), np.iinfo(np.int32)
    known = array.astype(np.int64, copy=False) if array.dtype.kind in "ib" else np.nan_to_num(array.astype(np.float64))
    small: Array = np.clip(known, limit.min, limit.max).astype(np.int32)
    return small


def _small(name: str, given: Any) -> Any:
    if not isinstance(given, np.ndarray):
        return given
    return np.array(given, np.float32) if name in VALUES else _ints(given)


def _fitted(array: Array, size: int, missing: int) -> Array:
    """Of ``size``, even if a file is damaged in a way that Parquet does not notice."""
    return array if len(array) == size else np.full(size, missing, np.int32)


class TokenCache:
    """The newest rollouts that were looked at."""

    def __init__(self) -> None:
        self._kept: ByteCache[tuple[str, int, int], Tokens] = ByteCache(_KEPT_BYTES, _kept_bytes)

    def tokens(self, run: Run, id: str) -> Tokens:
        file, row = find(run, id)
        try:
            key = (str(file.path), file.path.stat().st_mtime_ns, row)
        except OSError as error:
            raise not_found(f"{file.path.name} no longer exists.") from error
        known = self._kept.get(key)
        if known is not None:
            return known
        with OpenFile(file) as opened:
            if opened.is_large(row, _KEPT_BYTES):
                self._kept.clear()  # before there are two large ones
            tokens = Tokens.read(opened, row, run.vocabulary)
        return self._kept.put(key, tokens, in_use=(key,))


def _kept_bytes(tokens: Tokens) -> int:
    """At least as many as limit the number of short rollouts, whose arrays are the smallest part of what they need."""
    return max(tokens.num_bytes, _KEPT_BYTES // _MOST_KEPT)


def find(run: Run, id: str) -> tuple[RolloutFile, int]:
    source, key, row = parse_id(id)
    return run.rollouts[source].file(key), row


def rollout(run: Run, id: str, cache: TokenCache) -> dict[str, Any]:
    """Everything about one rollout but its tokens."""
    file, row = find(run, id)
    with OpenFile(file) as opened:
        extra = sorted(name for name in opened.columns if name.startswith("reward_"))
        values = opened.row(row, (*_SHOWN, *extra))
        siblings = _siblings(opened, file, values)
        num_rows, columns = opened.num_rows, [name for name in VALUES if name in opened.columns]
    tokens = cache.tokens(run, id)
    values |= {"advantages": tokens.values.get("advantages"), "loss_mask": tokens.mask}
    prompt, response = text(values.get("prompt")), text(values.get("response"))
    listed = row_of(id, values)
    media = media_of(values.get("media"))
    return {
        **listed,
        "source": run_source(id),
        "prompt": prompt[:MOST_CHARACTERS],
        "response": response[:MOST_CHARACTERS],
        "is_cut": max(len(prompt), len(response)) > MOST_CHARACTERS,
        "ground_truth": text(values.get("ground_truth"))[:MOST_CHARACTERS],
        "num_tokens": len(tokens.ids),
        "length": response_length(values),
        "messages": messages_of(values.get("messages"), media),
        "media": media,
        "info": parsed(values.get("info"), {}),
        "reward_info": {name.removeprefix("reward_"): jsonable(values.get(name)) for name in extra},
        "turn_rewards": [finite(each) for each in values.get("turn_rewards", ())],
        "columns": columns,
        "exact_bytes": run.vocabulary.is_exact(),
        "policy_versions": sorted({int(each) for each in np.unique(tokens.versions) if each != _NOT_SAMPLED}),
        "segments": segments(tokens),
        "previous": file.id_of(row - 1) if row > 0 else None,
        "next": file.id_of(row + 1) if row + 1 < num_rows else None,
        "siblings": siblings,
        "ranges": ranges(tokens),
        "problems": [run.vocabulary.problem] if run.vocabulary.problem else [],
    }


def run_source(id: str) -> Source:
    return parse_id(id)[0]


def _siblings(opened: OpenFile, file: RolloutFile, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The samples of the same prompt in the same file."""
    table = opened.read(("uid", "sample", "reward")).to_pydict()
    uids = table.get("uid", [])
    samples, rewards = (table.get(name) or [None] * len(uids) for name in ("sample", "reward"))
    return [
        {"id": file.id_of(place), "sample": samples[place], "reward": finite(rewards[place])}
        for place, uid in enumerate(uids)
        if uid == values.get("uid")
    ]


def segments(tokens: Tokens) -> list[list[Any]]:
    """Runs of tokens of the same kind: from, to, and whether they are the prompt, sampled or inserted."""
    kinds = tokens.kinds
    if not len(kinds):
        return []
    kinds[kinds == 2] = 1
    starts = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist()][: _MOST_SEGMENTS + 1]
    ends = [*starts[1:], len(kinds)]
    names = {0: "prompt", 1: "sampled", 3: "inserted"}
    found = [[begin, end, names[int(kinds[begin])]] for begin, end in zip(starts, ends, strict=True)]
    return found[:_MOST_SEGMENTS]


def ranges(tokens: Tokens) -> dict[str, list[float]]:
    """The smallest and the largest value of each column, for the scale of colours."""
    found = {}
    difference = tokens.difference
    for name, values in {**tokens.values, **({} if difference is None else {"difference": difference})}.items():
        known = values[np.isfinite(values)]
        if len(known):
            found[name] = [float(known.min()), float(known.max())]
    return found


def token_page(run: Run, id: str, cache: TokenCache, offset: int, limit: int) -> dict[str, Any]:
    """Some tokens of a rollout, as columns."""
    tokens = cache.tokens(run, id)
    total = len(tokens.ids)
    page = slice(min(offset, total), min(offset + limit, total))
    ids = tokens.ids[page].tolist()
    spelled = run.vocabulary.spell(ids, tokens.ids[max(0, page.start - 3) : page.start].tolist())
    difference = tokens.difference
    return {
        "id": id,
        "offset": offset,
        "limit": limit,
        "total": total,
        "ids": ids,
        "texts": spelled.texts,
        "bytes": [piece.hex() for piece in spelled.pieces],
        "is_split": spelled.is_split,
        "mask": tokens.mask[page].tolist(),
        "versions": tokens.versions[page].tolist(),
        "turns": tokens.turns[page].tolist(),
        "kinds": tokens.kinds[page].tolist(),
        "retokenised": [place - page.start for place in tokens.retokenised if page.start <= place < page.stop],
        "difference": None if difference is None else floats(difference[page]),
        **{name: floats(tokens.values[name][page]) if name in tokens.values else None for name in VALUES},
        "problems": [run.vocabulary.problem] if run.vocabulary.problem else [],
    }


def retokenised(row: Mapping[str, Any], prompt: Array, vocabulary: Vocabulary) -> list[int]:
    """Tokens of the prompt whose text is that of an earlier reply of the model: perhaps tokenised again.

    An agent that changes the conversation begins a new piece of its episode. The prompt of that piece contains earlier
    replies, tokenised from their text. Whether as they were sampled is not recorded, so all of them are marked. They
    are not trained there.
    """
    info = parsed(row.get("info"), {})
    pieces = info.get("num_pieces") if isinstance(info, Mapping) else None
    if not isinstance(pieces, int) or pieces < 2:
        return []
    spelled = [piece or b"" for piece in vocabulary.pieces(prompt.tolist())]
    ends, whole, begin = np.cumsum([len(piece) for piece in spelled]), b"".join(spelled), 0
    found: list[int] = []
    for message in messages_of(row.get("messages")):
        said = message["content"].strip().encode("utf-8", "replace")
        if message["role"] == "assistant" and said and (at := whole.find(said, begin)) >= 0:
            begin = at + len(said)
            found += range(int(np.searchsorted(ends, at, "right")), int(np.searchsorted(ends, begin, "left")) + 1)
    return sorted({place for place in found if place < len(prompt)})


def mismatches(run: Run, id: str, cache: TokenCache, count: int) -> dict[str, Any]:
    """The tokens on which engine and learner disagree most."""
    tokens = cache.tokens(run, id)
    difference = tokens.difference
    if difference is None:
        return {"id": id, "tokens": []}
    sizes = np.where(np.isfinite(difference), np.abs(difference), np.float32(-1.0))
    least = np.partition(sizes, -count)[-count] if len(sizes) > count else -1.0
    order = np.flatnonzero((sizes >= least) & (sizes >= 0))
    order = order[np.argsort(-sizes[order], kind="stable")][:count]
    return {
        "id": id,
        "tokens": [
            {
                "place": place,
                "difference": float(difference[place]),
                "logprob": finite(tokens.values["logprobs"][place]),
                "learner_logprob": finite(tokens.values["learner_logprobs"][place]),
                "text": _text_at(run.vocabulary, tokens, place),
            }
            for place in order.tolist()
        ],
    }


def _text_at(vocabulary: Vocabulary, tokens: Tokens, place: int) -> str:
    (piece,) = vocabulary.pieces([int(tokens.ids[place])])
    return piece.decode("utf-8", "replace") if piece is not None else f"⟨{int(tokens.ids[place])}⟩"
