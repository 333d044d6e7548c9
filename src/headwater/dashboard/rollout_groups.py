"""Rollouts of the same prompt: the groups of a step, one group side by side, and a prompt over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.dashboard.errors import not_found
from headwater.dashboard.pictures import media_of
from headwater.dashboard.plain_values import finite, floats
from headwater.dashboard.rollout_files import FACTS, OpenFile, RolloutFile, Source
from headwater.dashboard.rollout_query import read_rows, step_facts
from headwater.dashboard.rollout_row import MOST_CHARACTERS, ROW_COLUMNS, messages_of, row_of, text
from headwater.dashboard.runs import Run

_GROUP_CHARACTERS = 20_000
_MOST_STEPS = 200


def groups(
    run: Run, source: Source, step: int, sort: str, is_ascending: bool, offset: int, limit: int, wanted: str
) -> dict[str, Any]:
    """The prompts of a step, each with the rewards of its samples."""
    facts, files, names, problems = step_facts(run, source, step)
    uids = [names.of["uid"].texts[number] if number >= 0 else "" for number in facts["uid"].tolist()]
    if wanted:
        matching = np.zeros(len(facts), bool)
        for number, file in enumerate(files):
            of_file = facts["file"] == number
            if of_file.any():
                with OpenFile(file) as opened:
                    matching[of_file] = opened.matching(wanted)[facts["row"][of_file]]
        kept = {uids[place] for place in np.flatnonzero(matching).tolist()}
    places: dict[str, list[int]] = {}
    for place, uid in enumerate(uids):
        if not wanted or uid in kept:
            places.setdefault(uid, []).append(place)
    found = [_group(uid, facts[of_uid]) for uid, of_uid in places.items()]
    if sort != "place":
        name = {"reward": "reward_mean", "length": "length_mean"}.get(sort, sort)
        known = [each for each in found if each[name] is not None]
        unknown = [each for each in found if each[name] is None]
        found = sorted(known, key=lambda each: each[name], reverse=not is_ascending) + unknown
    elif not is_ascending:
        found.reverse()
    page = found[offset : offset + limit]
    for each in page:
        number, row = each.pop("first")
        shown = read_rows(files[number], [row], problems).get(row, {})
        each |= {"step": step, "prompt": shown.get("prompt", ""), "data_source": shown.get("data_source", "")}
    return {"total": len(found), "offset": offset, "limit": limit, "groups": page, "problems": problems}


def _group(uid: str, facts: NDArray[np.void]) -> dict[str, Any]:
    known = facts["reward"][np.isfinite(facts["reward"])]
    low, high = (float(known.min()), float(known.max())) if len(known) else (None, None)
    return {
        "uid": uid,
        "num": len(facts),
        "reward_mean": float(known.mean()) if len(known) else None,
        "reward_min": low,
        "reward_max": high,
        "spread": high - low if high is not None and low is not None else None,
        "rewards": floats(facts["reward"]),
        "length_mean": finite(facts["length"].mean()),
        "turns_max": int(facts["turns"].max()),
        "failures": int(facts["failures"].sum()),
        "first": (int(facts["file"][0]), int(facts["row"][0])),
    }


def group(run: Run, source: Source, step: int, uid: str) -> dict[str, Any]:
    """All samples of one prompt in one step, with their whole texts."""
    facts, files, names, problems = step_facts(run, source, step)
    number = names.of["uid"].find(uid)
    chosen = facts[facts["uid"] == number] if number is not None else facts[:0]
    if not len(chosen):
        raise not_found(f"Step {step} has no rollouts of the prompt {uid[:200]!r}.")
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    for file_number in dict.fromkeys(chosen["file"].tolist()):
        file = files[file_number]
        its = chosen[chosen["file"] == file_number]["row"].tolist()
        with OpenFile(file) as opened:
            first = first or opened.row(its[0], ("prompt", "data_source", "ground_truth", "media", "prompt_length"))
            rows += opened.rows(its, (*ROW_COLUMNS, "messages", "media"), partial(_sample, file))
    return {
        "uid": uid,
        "step": step,
        "source": source,
        "prompt": text(first.get("prompt"))[:MOST_CHARACTERS],
        "data_source": text(first.get("data_source")),
        "ground_truth": text(first.get("ground_truth"))[:MOST_CHARACTERS],
        "media": _prompt_media(first),
        "rollouts": rows,
        "problems": problems,
    }


def _prompt_media(first: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Images and videos of the prompt. Those that tools have returned come later."""
    length = first.get("prompt_length") or 0
    return [item for item in media_of(first.get("media")) if any(start < length for start, _ in item["blocks"])]


def _sample(file: RolloutFile, row: int, values: dict[str, Any]) -> dict[str, Any]:
    """A row with its whole text."""
    response, media = text(values.get("response")), media_of(values.get("media"))
    return {
        **row_of(file.id_of(row), values),
        "response": response[:_GROUP_CHARACTERS],
        "is_cut": len(response) > _GROUP_CHARACTERS,
        "messages": messages_of(values.get("messages"), media),
        "media": media,
    }


def over_steps(run: Run, source: Source, uid: str) -> dict[str, Any]:
    """The same prompt at every step that drew it: what was learned."""
    index = run.index[source]
    index.start(0.4)
    state, number = index.state(), index.names.of["uid"].find(uid)
    blocks = [block[block["uid"] == number] for block in index.blocks()] if number is not None else []
    facts = np.concatenate(blocks) if blocks else np.zeros(0, FACTS)
    if not len(facts):
        if state["state"] == "building":
            return {"uid": uid, "index": state, "prompt": "", "steps": [], "num_steps": 0, "problems": []}
        raise not_found(f"This run has no saved rollouts of the prompt {uid[:200]!r}.")
    files, problems = index.files(), list(index.problems)
    step_of = np.array([file.step for file in files], np.int64)[facts["file"]]
    steps = np.unique(step_of)
    shown = steps[np.linspace(0, len(steps) - 1, min(len(steps), _MOST_STEPS)).round().astype(int)]
    found = [_at_step(step, facts[step_of == step], files, problems) for step in shown.tolist()]
    prompt = next((each["best"]["prompt"] for each in found if each["best"]), "")
    return {
        "uid": uid,
        "index": state,
        "prompt": prompt,
        "steps": found,
        "num_steps": len(steps),
        "problems": problems[:20],
    }


def _at_step(step: int, facts: NDArray[np.void], files: Sequence[RolloutFile], problems: list[str]) -> dict[str, Any]:
    rewards = facts["reward"]
    is_known = np.isfinite(rewards)
    places = [int(np.where(is_known, rewards, -np.inf).argmax()), int(np.where(is_known, rewards, np.inf).argmin())]
    wanted = {place: (int(facts["file"][place]), int(facts["row"][place])) for place in places}
    shown = {place: read_rows(files[file], [row], problems).get(row) for place, (file, row) in wanted.items()}
    return {
        "step": step,
        "rewards": floats(rewards),
        "reward_mean": float(rewards[is_known].mean()) if is_known.any() else None,
        "length_mean": finite(facts["length"].mean()),
        "best": shown[places[0]],
        "worst": shown[places[1]],
    }
