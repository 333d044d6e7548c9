"""Functions of ``verl.utils.reward_score`` for reward functions that call them. Headwater's own scorers do the work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from headwater.rewards.answers import last_boxed
from headwater.rewards.scorers import SCORERS, scorer_of
from headwater.rewards.verifier import verify

_GSM8K_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_ANY_NUMBER = re.compile(r"-?[0-9.,]+")
_CPU_S = 2.0


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: Any = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: Any = None,
    **settings: Any,
) -> Any:
    """The score of the built-in scorer of a data source. Limits of a sandbox service have no effect: ``reward.workers``
    limits the calls."""
    scorer = scorer_of(data_source)
    if sandbox_fusion_url and scorer == "code":
        settings["sandbox_fusion_url"] = sandbox_fusion_url
    return SCORERS.resolve(scorer)(data_source, solution_str, ground_truth, extra_info or {}, **settings)


def gsm8k_score(
    solution_str: str,
    ground_truth: Any,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    made = _score("gsm8k", solution_str, ground_truth, method=method, format_score=format_score)
    return score if made == 1.0 else made


def gsm8k_solution(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The final number of a solution as text, without separators; None if there is none."""
    found = (_GSM8K_NUMBER if method == "strict" else _ANY_NUMBER).findall(solution_str)
    numbers = [each.replace(",", "").rstrip(".") for each in found]
    return next((each for each in reversed(numbers) if each), None)


def math_score(solution_str: str, ground_truth: Any, **settings: Any) -> float:
    return float(_score("math", solution_str, ground_truth)["score"])


def math_verify_score(model_output: str, ground_truth: Any, timeout_score: float = 0.0) -> float:
    made = _score("math", model_output, ground_truth, extract="any")
    return timeout_score if made["verdict"] == "timed_out" else float(made["score"])


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers are mathematically equal."""
    if str1 is None or str2 is None:
        return str1 is str2
    return verify(str1, str2, cpu_s=_CPU_S) == "right"


def last_boxed_only_string(string: str) -> str | None:
    r"""The last ``\boxed{...}`` with its braces."""
    content = last_boxed(string)
    return None if content is None else f"\\boxed{{{content}}}"


def remove_boxed(s: str) -> str:
    r"""The content of ``\boxed{...}``."""
    content = last_boxed(s)
    if content is None:
        raise ValueError(f"{s!r} has no complete \\boxed{{...}}")
    return content


def math_dapo_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    made: dict[str, Any] = _score("math_dapo", solution_str, ground_truth, strict_box_verify=strict_box_verify)
    return {"score": made["score"], "acc": bool(made["acc"]), "pred": made["pred"]}


def geo3k_score(predict_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1) -> float:
    if not use_boxed:
        predict_str = f"{predict_str}\\boxed{{{predict_str}}}"
    return float(_score("geometry3k", predict_str, ground_truth, format_score=format_score)["score"])


def search_qa_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    made = _score("search_qa", solution_str, ground_truth, format_score=format_score)
    return score if made["acc"] else float(made["score"])


def _score(scorer: str, solution: str, ground_truth: Any, **settings: Any) -> Any:
    return SCORERS.resolve(scorer)(scorer, solution, ground_truth, {}, **settings)
