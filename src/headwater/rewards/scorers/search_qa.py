"""Short answers to questions about facts, as in Search-R1: exact match and F1 of words."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headwater.config.traits import ScorerTraits
from headwater.rewards.answers import last_answer_tag
from headwater.rewards.scorers import SCORERS

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@SCORERS.register(
    ScorerTraits(
        data_sources=("searchR1_*", "nq", "nq_open", "triviaqa", "trivia_qa", "popqa", "hotpotqa", "hotpot_qa",
                      "2wikimultihopqa", "musique", "bamboogle", "squad"),
        is_quick=True,
    )
)  # fmt: skip
def search_qa(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    metric: Literal["exact_match", "contains", "f1"] = "exact_match",
    format_score: float = 0.0,
) -> dict[str, Any]:
    """The match of the last <answer> with the best of the accepted answers; without <answer>, 0.0.

    ``contains`` accepts an answer that contains an accepted one. A wrong answer in <answer> gets ``format_score``.
    """
    if metric not in ("exact_match", "contains", "f1"):
        raise ValueError(f"reward.function_args.metric = {metric!r}: use exact_match, contains or f1")
    targets = [words(target) for target in _targets(ground_truth)]
    answer = last_answer_tag(solution_str)
    said = words(answer or "")
    match = {
        "exact_match": float(any(said == target for target in targets)),
        "contains": float(any(f" {' '.join(target)} " in f" {' '.join(said)} " for target in targets)),
        "f1": max(f1(said, target) for target in targets),
    }
    if answer is None:
        match = dict.fromkeys(match, 0.0)
    score = match[metric]
    if answer is not None and score == 0.0:
        score = format_score
    return {"score": score, "acc": match["exact_match"], "f1": match["f1"], "pred": answer or ""}


def words(text: str) -> list[str]:
    """The words of an answer after SQuAD's normalisation: lower case, no punctuation, no articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(said: Sequence[str], target: Sequence[str]) -> float:
    """The harmonic mean of the shares of words that two answers have in common."""
    if not said or not target or _is_verdict(said) or _is_verdict(target):
        return float(list(said) == list(target))
    common = sum((Counter(said) & Counter(target)).values())
    return 2.0 * common / (len(said) + len(target))


def _is_verdict(answer: Sequence[str]) -> bool:
    """Yes and no are right or wrong; a longer answer that contains the word gets no share."""
    return list(answer) in (["yes"], ["no"], ["noanswer"])


def _targets(ground_truth: Any) -> list[str]:
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target", ground_truth.get("answers"))
    if isinstance(ground_truth, str) or not isinstance(ground_truth, Sequence):
        ground_truth = [ground_truth]
    targets = [str(target) for target in ground_truth if target is not None]
    if not targets:
        raise ValueError("the row has no ground truth; give it a text, a list of texts, or {'target': [...]}")
    return targets
