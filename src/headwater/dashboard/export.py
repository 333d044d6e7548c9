"""A run, or one rollout, as a single HTML file: the page with the answers that it would ask a server for."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from headwater.dashboard.answers import Answers
from headwater.dashboard.assets import Assets
from headwater.dashboard.errors import Refused
from headwater.dashboard.pictures import picture
from headwater.dashboard.plain_values import encoded
from headwater.dashboard.rollout_files import SOURCES, Source
from headwater.dashboard.rollout_view import find
from headwater.dashboard.runs import Run

_STEPS = 5
_ROLLOUTS_PER_STEP = 50
_MOST_SIBLINGS = 32
_MOST_BYTES = 40 << 20
"""From this size on, no more rollouts are added."""
_MOST_PICTURE_BYTES = 4 << 20
_MOST_FRAMES = 8
"""Frames of a video."""
PAGE_TOKENS = 4096
"""The page asks for this many tokens at a time."""
_MOST_TOKENS, _MOST_TOKENS_OF_ONE = 1 << 15, 1 << 18
"""Tokens of each rollout of an exported run, and of the one rollout that was asked for. A token takes 100 bytes."""
_WHOLE = ("", "config", "keys", "staleness", "stages", "ledger", "doctor", "engine", "timeline")


class Export:
    """Collects answers under the keys by which the page looks them up: the path, and the parameters that do not have
    their default, by name, both as they were before they were escaped for an address."""

    def __init__(self, answers: Answers, run: Run) -> None:
        self._answers = answers
        self._run = run
        self.run_name = run.name
        self.collected: dict[str, Any] = {}
        self.num_rollouts = 0
        self.num_without_tokens = 0
        """Rollouts that are listed, but came after the file was large already."""
        self.num_cut = 0
        """Rollouts of which only the first tokens are there."""
        self.num_without_picture = 0
        """Images and frames that are not in the file, because it or they are too large, or because they are missing."""
        self._num_bytes = 0

    def add(self, what: str, **given: object) -> Any:
        """The answer to ``/api/runs/RUN/what``. One that fails is left out, and the page says that it is missing."""
        parameters = {name: str(value) for name, value in given.items()}
        key = key_of(f"/api/runs/{self._run.name}{f'/{what}' if what else ''}", parameters)
        if key not in self.collected:
            asked = {name: quote(value) if name == "keys" else value for name, value in parameters.items()}
            try:
                answer = self._answers.of_run(self._run.name, what, asked)
                self._num_bytes += len(encoded(answer))
                self.collected[key] = answer
            except Refused as refused:
                if refused.code == "unknown_run":
                    raise
                return None
        return self.collected[key]

    def needed(self, what: str, **given: object) -> Any:
        """Like ``add``, but raise ``Refused`` if there is no answer."""
        answer = self.add(what, **given)
        if answer is None:
            return self._answers.of_run(self._run.name, what, {name: str(value) for name, value in given.items()})
        return answer

    def curves(self) -> None:
        keys = self.add("keys")
        for each in (each for group in keys["groups"] for each in group["keys"]):
            kind = {} if each["kind"] == "train" else {"kind": each["kind"]}
            self.add("metrics", keys=each["key"], **kind)

    def rollout(self, id: str, most_tokens: int = _MOST_TOKENS) -> None:
        """One rollout with its tokens and its group, unless the file is large already."""
        if self._num_bytes > _MOST_BYTES:
            self.num_without_tokens += 1
            return
        shown = self.add("rollout", id=id)
        if shown is None:
            return
        self.num_rollouts += 1
        self._tokens(shown, most_tokens)
        self._pictures(shown)
        self.add("mismatches", id=id)
        self.add("group", step=shown["step"], uid=shown["uid"], **_told(shown["source"]))

    def _tokens(self, shown: dict[str, Any], most: int) -> None:
        """Its pages of tokens. If some are left out, the rollout says so."""
        total, done = shown["num_tokens"], 0
        while True:
            page = self.add("tokens", id=shown["id"], **({"offset": done} if done else {}))
            done = min(total, done + PAGE_TOKENS) if page is not None else done
            if page is None or done >= min(total, most) or self._num_bytes > _MOST_BYTES:
                break
        shown["num_tokens_in_file"] = done
        if done < total:
            self.num_cut += 1
            message = f"This file has the first {done:,} of the {total:,} tokens of this rollout."
            shown["problems"] = [*shown["problems"], message]

    def _pictures(self, shown: dict[str, Any]) -> None:
        """The images of a rollout as data URLs, each once. Of a video, the first frames."""
        for item in shown["media"]:
            is_video = item["kind"] == "video"
            for frame in range(min(item["num_frames"], _MOST_FRAMES)) if is_video else [None]:
                given = {"digest": item["digest"], **({} if frame is None else {"frame": str(frame)})}
                key = key_of(f"/api/runs/{self._run.name}/media", given)
                if key not in self.collected:
                    self.collected[key] = {"url": self._picture(given)}
            self.num_without_picture += max(0, item["num_frames"] - _MOST_FRAMES) if is_video else 0

    def _picture(self, given: Mapping[str, str]) -> str | None:
        try:
            found = picture(self._run, given)
        except Refused:
            found = None
        if found is None or len(found.content) > _MOST_PICTURE_BYTES or self._num_bytes > _MOST_BYTES:
            self.num_without_picture += 1
            return None
        url = found.data_url
        self._num_bytes += len(url)
        return url

    def step(self, source: Source, step: int) -> None:
        """The rollouts of one step: those that its first page lists."""
        listed = self.add("rollouts", step=step, **_told(source))
        self.add("groups", step=step, **_told(source))
        for each in (listed or {}).get("rollouts", [])[:_ROLLOUTS_PER_STEP]:
            self.rollout(each["id"])


def _told(source: str) -> dict[str, str]:
    """A parameter that has its default is not part of a key."""
    return {} if source == "train" else {"source": source}


def key_of(path: str, given: Mapping[str, str]) -> str:
    pairs = "&".join(f"{name}={value}" for name, value in sorted(given.items()))
    return f"{path}?{pairs}" if pairs else path


def export(answers: Answers, assets: Assets, name: str, rollout: str | None = None) -> str:
    """The HTML text. Of a run, the rollouts of a few steps are in it; of a rollout, that one and its group."""
    run = answers.runs.get(name)
    made = Export(answers, run)
    if rollout is None:
        _add_run(made)
    else:
        _add_rollout(made, run, rollout)
    about = {"run": name, "rollout": rollout, "time": time.time(), "contents": contents(made, rollout)}
    info = {**answers.info(), "is_export": True, "exported": about, "servers": [], "runs_dir": "", "single_run": name}
    summary = made.collected[f"/api/runs/{name}"]
    summary["path"] = ""  # whoever gets the file need not know where it was
    return assets.with_data({"/api/info": info, "/api/runs": {"runs": [summary], "problems": []}, **made.collected})


def contents(made: Export, rollout: str | None) -> list[str]:
    """What is in the file and what is not, as sentences for those who get it."""
    found = []
    if rollout is None:
        found.append("This file has all curves of the run at up to 1,000 points each.")
        for source in SOURCES:
            of_source = f"/api/runs/{made.run_name}/steps" + ("" if source == "train" else f"?source={source}")
            steps = made.collected.get(of_source, {"steps": []})
            if chosen := [str(each["step"]) for each in steps["steps"]]:
                kind = "training steps" if source == "train" else "evaluations after steps"
                found.append(
                    f"It has rollouts of {len(chosen)} of {steps['num_steps']} {kind} ({', '.join(chosen)}), "
                    f"up to {_ROLLOUTS_PER_STEP} each."
                )
    else:
        found.append(f"This file has the rollout {rollout} and {made.num_rollouts - 1} others of its prompt.")
    if made.num_without_tokens:
        found.append(f"{made.num_without_tokens} more rollouts were left out, to keep the file small.")
    if made.num_without_picture:
        found.append(f"{made.num_without_picture} images or frames of videos were left out, to keep the file small.")
    if made.num_cut:
        found.append(f"Of {made.num_cut} long rollouts, only the first tokens are in it; each says how many.")
    return found


def _add_run(made: Export) -> None:
    for what in _WHOLE:
        made.add(what)
    made.curves()
    for source in SOURCES:
        steps = made.add("steps", **_told(source))
        chosen = _chosen([each["step"] for each in steps["steps"]])
        _offer(steps, chosen)
        for step in chosen:
            made.step(source, step)


def _add_rollout(made: Export, run: Run, id: str) -> None:
    find(run, id)  # raises what is wrong with the id
    for what in ("", "config", "ledger"):
        made.add(what)
    shown = made.needed("rollout", id=id)
    made.rollout(id, _MOST_TOKENS_OF_ONE)
    siblings = [each["id"] for each in shown["siblings"] if each["id"] != id]
    for each in siblings[:_MOST_SIBLINGS]:
        made.rollout(each)
    made.num_without_tokens += len(siblings[_MOST_SIBLINGS:])
    _offer(made.add("steps", **_told(shown["source"])), [shown["step"]])


def _offer(steps: dict[str, Any], chosen: Collection[int]) -> None:
    """The page lists only the steps that are in the file."""
    steps["num_steps"] = len(steps["steps"])
    steps["steps"] = [each for each in steps["steps"] if each["step"] in chosen]


def _chosen(steps: Iterable[int]) -> list[int]:
    """A few steps from the first to the last."""
    known = list(steps)
    if len(known) <= _STEPS:
        return known
    return sorted({known[round(place * (len(known) - 1) / (_STEPS - 1))] for place in range(_STEPS)})
