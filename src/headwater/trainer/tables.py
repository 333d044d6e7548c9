"""The Parquet files of a run: rollouts, and ``tokens.parquet`` with the bytes of every token of the vocabulary.

Rollout files contain token ids. With the table of tokens, a reader shows what each of them stands for, down to single
bytes, without the model's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headwater.core.disk import disk_full
from headwater.core.records import Prompt, TokenArrays, Trajectory, make_arrays
from headwater.models.token_pieces import pieces_of
from headwater.observe.media_store import MediaStore, media_to_json
from headwater.rollout.group import num_replies, num_turns
from headwater.trainer.experience import LEARNER_LOGPROBS

if TYPE_CHECKING:
    from torch import Tensor

IS_EXACT = b"is_exact"
"""Key of the table's metadata: ``1`` if the text of a response is the concatenation of its tokens' bytes."""

_GROUP_TOKENS = 1 << 20
"""About how many tokens a row group of a rollout file has."""


def write_tokens(path: Path, tokenizer: Any) -> None:
    """Columns ``bytes`` and ``is_special``; the row number is the token id.

    A tokenizer that joins its tokens in another way gives the text of each token alone, which is then not exact.
    """
    known = pieces_of(tokenizer)
    vocabulary = tokenizer.get_vocab()
    size = max(vocabulary.values(), default=-1) + 1
    if known is not None:
        pieces = [known.of(token) for token in range(size)]
    else:
        pieces = [tokenizer.decode([token]).encode("utf-8", "replace") for token in range(size)]
    special = set(tokenizer.all_special_ids) | {
        token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special
    }
    table = pa.table(
        {
            "bytes": pa.array(pieces, pa.binary()),
            "is_special": pa.array([token in special for token in range(size)], pa.bool_()),
        }
    )
    write_table(table.replace_schema_metadata({IS_EXACT: b"0" if known is None else b"1"}), path, "the vocabulary")


def write_table(table: pa.Table, path: Path, what: str, rows_per_group: int | None = None) -> None:
    """Write a Parquet file under another name and rename it, so that a reader never sees an incomplete one."""
    temporary = path.with_name(f".{path.name}")
    try:
        pq.write_table(table, temporary, row_group_size=rows_per_group)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if (full := disk_full(error, path, what)) is not None:
            raise full from error
        raise


def samples_of(rollouts: Sequence[tuple[Prompt, Trajectory]], count: int) -> list[dict[str, Any]]:
    """The first responses to the first ``count`` prompts, as a table for people."""
    firsts = {prompt.uid: (prompt, each) for prompt, each in reversed(rollouts)}
    chosen = [firsts[uid] for uid in dict.fromkeys(prompt.uid for prompt, _ in rollouts)][:count]
    return [
        {
            "uid": prompt.uid,
            "prompt": prompt.text,
            "response": response_text(each),
            "ground_truth": truth if isinstance(truth := prompt.ground_truth, str) else _to_json(truth),
            "reward": each.reward,
        }
        for prompt, each in chosen
    ]


def response_text(trajectory: Trajectory) -> str:
    """The model's reply. If there were several, all of them and the messages between them, each with its role."""
    replies = [at for at, message in enumerate(trajectory.messages) if message.get("role") == "assistant"]
    if len(replies) > 1:
        count = num_replies(trajectory)
        if 1 < count <= len(replies):
            said = trajectory.messages[replies[-count] :]  # earlier replies belong to the prompt
            return "\n\n".join(f"[{message.get('role')}]\n{_said(message)}" for message in said)
    return str(trajectory.info.get("response_text", ""))


def _ended_by(trajectory: Trajectory) -> str | None:
    noted = trajectory.info.get("ended_by")
    return noted if isinstance(noted, str) else None


def _said(message: Mapping[str, Any]) -> str:
    """The content of a message, and its tool calls as JSON."""
    calls = [_to_json(call.get("function", call)) for call in message.get("tool_calls") or ()]
    content = message.get("content")
    return "\n".join([*([_shown(content)] if content or not calls else []), *calls])


def _shown(content: Any) -> str:
    """The text of a message; ``[image]`` and ``[video]`` where it has these."""
    if not isinstance(content, (list, tuple)):
        return str(content)
    return "".join(str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]" for part in content)


_ENCODER = json.JSONEncoder(default=str, ensure_ascii=False)
"""Made once: ``json.dumps`` would make one for every value."""


def _to_json(value: object) -> str:
    """JSON that people can read. Half of a surrogate pair, which a file cannot hold, stays escaped."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace").decode()


def write_rollouts(
    path: Path,
    step: int,
    rollouts: Sequence[tuple[Prompt, Trajectory]],
    token_columns: Mapping[str, Tensor] = MappingProxyType({}),
    store: MediaStore | None = None,
) -> None:
    """One Parquet row per trajectory: texts for people, and tokens, log-probs, masks and versions for programs.

    ``response`` is everything after the prompt as text; ``messages`` is the whole conversation, as JSON. ``num_turns``
    counts the model's messages, and ``ended_by`` is what the workflow noted. What the scorer returned beside the reward
    is in columns ``reward_<name>``. ``token_columns``, ``[trajectories, response]``, become lists with one value per
    token of prompt and response, 0 in the prompt. ``logprob_gap`` is the largest difference between the learner's
    log-probs and those of the engine. Like the numbers of tokens and calls, it is there so that a reader can sort and
    filter without the lists. ``media`` is null, or a JSON list of the images and videos: their kind, digest, files in
    ``store``, where each is written once, and the blocks of tokens that stand for them.
    """
    if store is not None:
        for _, trajectory in rollouts:
            for item in trajectory.media:
                store.add(item.content)
    prompts, trajectories = [prompt for prompt, _ in rollouts], [trajectory for _, trajectory in rollouts]
    make_arrays(trajectories)
    prompt_lengths = np.array([each.prompt_length for each in trajectories], np.int64)
    lengths = np.array([len(each.tokens) for each in trajectories], np.int64)
    # Samples share their prompt.
    truths = {key: _to_json(each.ground_truth) for key, each in {id(each): each for each in prompts}.items()}
    table = pa.table(
        {
            "step": np.full(len(rollouts), step),
            "uid": [each.uid for each in trajectories],
            "sample": [each.sample for each in trajectories],
            "data_source": [each.data_source for each in prompts],
            "prompt": [each.text for each in prompts],
            "response": [response_text(each) for each in trajectories],
            "messages": [_to_json(each.messages) for each in trajectories],
            "ground_truth": [truths[id(each)] for each in prompts],
            "reward": [each.reward for each in trajectories],
            "stop_reason": [each.stop_reason for each in trajectories],
            "num_turns": num_turns(trajectories),
            "prompt_length": prompt_lengths,
            "response_length": lengths - prompt_lengths,
            "num_tool_calls": [_count(each.info.get("num_tool_calls")) for each in trajectories],
            "num_failed_calls": [_count(each.info.get("tool_failures")) for each in trajectories],
            "info": [_to_json(dict(each.info)) for each in trajectories],
        }
    )
    ended_by = pa.array([_ended_by(trajectory) for _, trajectory in rollouts], pa.string())
    table = table.append_column("ended_by", ended_by)
    media = [_to_json(media_to_json(each.media)) if each.media else None for _, each in rollouts]
    table = table.append_column("media", pa.array(media, pa.string()))
    infos = [trajectory.reward_info for _, trajectory in rollouts]
    for name in dict.fromkeys(name for info in infos for name in info):
        table = table.append_column(f"reward_{name}", _column([info.get(name) for info in infos]))
    arrays = [trajectory.arrays for _, trajectory in rollouts]
    table = table.append_column("turn_rewards", _lists([np.array(each.turn_rewards, float) for _, each in rollouts]))
    # Converting lists one value at a time would take seconds for long responses.
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        table = table.append_column(name, _lists([getattr(each, name) for each in arrays]))
    starts = pa.array(np.append(0, lengths.cumsum()), pa.int32())
    for name, values in token_columns.items():
        joined = _of_all_tokens(values.float().numpy(), prompt_lengths, lengths - prompt_lengths)
        table = table.append_column(name, pa.ListArray.from_arrays(starts, joined))
        if name == LEARNER_LOGPROBS:
            lists = np.split(joined, lengths.cumsum()[:-1])
            gaps = [_largest_gap(each, its) for each, its in zip(arrays, lists, strict=True)]
            table = table.append_column("logprob_gap", pa.array(gaps, pa.float64()))
    num_tokens = int(lengths.sum())
    # A reader of one rollout reads its whole row group.
    rows_per_group = max(1, _GROUP_TOKENS * len(rollouts) // max(1, num_tokens))
    write_table(table, path, "the rollouts", rows_per_group)


def _count(noted: object) -> int:
    """A number that a workflow noted, or the sum of numbers by name; 0 if it noted none."""
    if isinstance(noted, Mapping):
        return sum(_count(each) for each in noted.values())
    return noted if isinstance(noted, int) else 0


def _largest_gap(arrays: TokenArrays, learner: NDArray[Any]) -> float | None:
    trained = arrays.loss_mask != 0
    return float(np.abs(learner - arrays.logprobs)[trained].max()) if trained.any() else None


def _column(values: Sequence[Any]) -> pa.Array:
    """Numbers as numbers, texts as text, and anything else, or a mixture of these, as JSON."""
    given = [value for value in values if value is not None]
    if all(isinstance(value, (bool, int, float, np.number)) for value in given):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    is_text = all(isinstance(value, str) for value in given)
    texts = [None if value is None else value if is_text else _to_json(value) for value in values]
    return pa.array([None if text is None else text.encode("utf-8", "backslashreplace").decode() for text in texts])


def _of_all_tokens(padded: NDArray[Any], prompt_lengths: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[Any]:
    """The values ``[responses, width]`` of each response after zeros for its prompt, one response after the other."""
    parts = np.stack([prompt_lengths, lengths], axis=1).ravel()
    is_response = np.repeat(np.tile([False, True], len(lengths)), parts)
    values = np.zeros(len(is_response), padded.dtype)
    values[is_response] = padded[np.arange(padded.shape[1]) < lengths[:, None]]
    return values


def _lists(values: Sequence[NDArray[Any]]) -> pa.Array:
    """A column of lists, one per array."""
    starts = pa.array(np.cumsum([0, *(len(each) for each in values)]), pa.int32())
    joined = np.concatenate(values) if values else np.zeros(0, np.int64)
    return pa.ListArray.from_arrays(starts, joined.astype(np.int64) if joined.dtype == np.bool_ else joined)
