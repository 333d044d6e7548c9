"""The final answer of a mathematics problem, compared symbolically: MATH, NuminaMath and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headwater.config.traits import ScorerTraits
from headwater.rewards.answers import last_answer_line, last_answer_tag, last_boxed
from headwater.rewards.scorers import SCORERS
from headwater.rewards.verifier import UNVERIFIED, Verdict, verify

VERIFY_CPU_S = 2.0
"""Default limit of one comparison, which usually takes 20 milliseconds."""


@SCORERS.register(
    ScorerTraits(
        data_sources=(
            "lighteval/MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "HuggingFaceH4/MATH-500",
            "hendrycks/competition_math",
            "EleutherAI/hendrycks_math",
            "hendrycks_math",
            "math500",
            "math_verify",
            "numina_*",
            "AI-MO/NuminaMath-CoT",
            "AI-MO/NuminaMath-TIR",
            "deepscaler",
            "agentica-org/DeepScaleR-Preview-Dataset",
        )
    )
)
def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    extract: Literal["boxed", "any"] = "boxed",
    verify_cpu_s: float = VERIFY_CPU_S,
) -> dict[str, Any]:
    r"""1.0 if the answer in the last ``\boxed{}`` equals the ground truth mathematically.

    With ``extract: any``, a response without a box is judged by its last <answer>, ``Answer: ...`` or ``answer is``.
    """
    if extract not in ("boxed", "any"):
        raise ValueError(f"reward.function_args.extract = {extract!r}: use 'boxed' or 'any'")
    answer = last_boxed(solution_str)
    if answer is None and extract == "any":
        tagged = last_answer_tag(solution_str)
        answer = tagged if tagged is not None else last_answer_line(solution_str, needs_colon=False)
    return judged(answer, ground_truth, verify_cpu_s)


def judged(answer: str | None, ground_truth: Any, cpu_s: float) -> dict[str, Any]:
    """A score of 1.0 or 0.0 with what was compared and how it ended.

    An answer that cannot be verified within the limits scores 0.0; ``unverified`` counts such answers.
    """
    truths = _truths(ground_truth)
    verdict: Verdict | Literal["no_answer"] = "no_answer"
    if answer is not None and answer.strip():
        for truth in truths:
            verdict = verify(truth, answer, cpu_s=cpu_s)
            if verdict != "wrong":
                break
    right = float(verdict == "right")
    return {
        "score": right,
        "acc": right,
        "pred": answer or "",
        "verdict": verdict,
        "unverified": float(verdict in UNVERIFIED),
    }


def _truths(ground_truth: Any) -> list[str]:
    """The accepted answers: one, or a list. A whole solution is represented by its box."""
    given = ground_truth if isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str) else [ground_truth]
    texts = [str(each) for each in given if each is not None and str(each).strip()]
    if not texts:
        raise ValueError("the row has no ground truth; give it a ground_truth or reward_model.ground_truth")
    return [boxed if (boxed := last_boxed(text)) is not None else text for text in texts]
