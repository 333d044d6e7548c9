"""One rollout, with all values of all its tokens."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.dashboard.errors import not_found
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
_TOKENS = ("tokens", "loss_mask", "versions", "prompt_length", "messages", "info", *VALUES)
_NOT_SAMPLED = -1
_KEPT_TOKENS = 4_000_000
"""Tokens of rollouts that were looked at last are kept, so that paging through a long one reads it once."""
_SHOWN = (
    *ROW_COLUMNS, "messages", "ground_truth", "info", "turn_rewards", "loss_mask", "versions", "logprobs",
    "learner_logprobs", "returns", "values", "reference_logprobs", "entropies",
)  # fmt: skip

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
    """Places of tokens that repeat an earlier reply of the model, made from its text again."""

    @classmethod
    def of(cls, row: Mapping[str, Any], vocabulary: Vocabulary) -> Tokens:
        ids = _ints(row.get("tokens"))
        size = len(ids)
        mask, versions = (
            _fitted(_ints(row.get(name)), size, missing) for name, missing in (("loss_mask", 0), ("versions", -1))
        )
        values = {}
        for name in VALUES:
            given = row.get(name)
            if given is not None and len(given) == size and (size or name == "logprobs"):
                sampled = versions != _NOT_SAMPLED if name == "logprobs" else mask != 0
                values[name] = np.where(sampled, np.asarray(given, np.float64), np.nan).astype(np.float32)
        prompt_length = max(0, min(size, int(row.get("prompt_length") or 0)))
        again = retokenised(row, ids[:prompt_length].tolist(), vocabulary)
        return cls(ids, mask.astype(np.int8), versions, prompt_length, values, again)

    @property
    def kinds(self) -> Array:
        """0 prompt, 1 trained, 2 sampled but not trained, 3 inserted."""
        sampled = self.versions != _NOT_SAMPLED
        kinds = np.where(self.mask != 0, 1, np.where(sampled, 2, 3))
        kinds[: self.prompt_length] = np.where(sampled[: self.prompt_length], kinds[: self.prompt_length], 0)
        return kinds

    @property
    def turns(self) -> Array:
        """The turn of the model to which a token belongs; -1 outside. A turn is a run of sampled tokens."""
        sampled = self.versions != _NOT_SAMPLED
        begins = sampled & ~np.concatenate([[False], sampled[:-1]]) if len(sampled) else sampled
        return np.where(sampled, np.cumsum(begins) - 1, -1)

    @property
    def difference(self) -> Array | None:
        """Learner - engine, of trained tokens."""
        if "learner_logprobs" not in self.values or "logprobs" not in self.values:
            return None
        return self.values["learner_logprobs"] - self.values["logprobs"]


def _ints(given: Any) -> Array:
    if given is None:
        return np.zeros(0, np.int64)
    array = np.asarray(given)
    return (
        np.nan_to_num(array.astype(np.float64)).astype(np.int64)
        if array.dtype.kind not in "iub"
        else array.astype(np.int64)
    )


def _fitted(array: Array, size: int, missing: int) -> Array:
    """Of ``size``, even if a file is damaged in a way that Parquet does not notice."""
    return array if len(array) == size else np.full(size, missing, np.int64)


class TokenCache:
    """The newest rollouts that were looked at."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int, int], Tokens] = OrderedDict()
        self._lock = threading.Lock()

    def tokens(self, run: Run, id: str) -> Tokens:
        file, row = find(run, id)
        try:
            key = (str(file.path), file.path.stat().st_mtime_ns, row)
        except OSError as error:
            raise not_found(f"{file.path.name} no longer exists.") from error
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        with OpenFile(file) as opened:
            tokens = Tokens.of(opened.row(row, _TOKENS), run.vocabulary)
        with self._lock:
            self._kept[key] = tokens
            while len(self._kept) > 1 and sum(len(each.ids) for each in self._kept.values()) > _KEPT_TOKENS:
                self._kept.popitem(last=False)
            while len(self._kept) > 64:
                self._kept.popitem(last=False)
        return tokens


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
    prompt, response = text(values.get("prompt")), text(values.get("response"))
    listed = row_of(id, values)
    return {
        **listed,
        "source": run_source(id),
        "prompt": prompt[:MOST_CHARACTERS],
        "response": response[:MOST_CHARACTERS],
        "is_cut": max(len(prompt), len(response)) > MOST_CHARACTERS,
        "ground_truth": text(values.get("ground_truth"))[:MOST_CHARACTERS],
        "num_tokens": len(tokens.ids),
        "length": response_length(values),
        "messages": messages_of(values.get("messages")),
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
    kinds = np.array(["prompt", "sampled", "sampled", "inserted"])[tokens.kinds] if len(tokens.ids) else np.array([])
    if not len(kinds):
        return []
    edges = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
    starts = [0, *edges.tolist()]
    return [[begin, end, str(kinds[begin])] for begin, end in zip(starts, [*starts[1:], len(kinds)], strict=True)][
        :5000
    ]


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


def retokenised(row: Mapping[str, Any], prompt: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Tokens of the prompt that repeat a reply of the model.

    An agent that changes the conversation begins a new piece of its episode. The prompt of that piece contains earlier
    replies, tokenised from their text and perhaps not as they were sampled. They are not trained there.
    """
    info = parsed(row.get("info"), {})
    pieces = info.get("num_pieces") if isinstance(info, Mapping) else None
    if not isinstance(pieces, int) or pieces < 2:
        return []
    spelled = [piece or b"" for piece in vocabulary.pieces(prompt)]
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
    sizes = np.abs(np.nan_to_num(difference, nan=-1.0))
    sizes[~np.isfinite(difference)] = -1.0
    order = np.argsort(-sizes, kind="stable")[:count]
    order = order[sizes[order] >= 0]
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
