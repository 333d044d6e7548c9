"""What a run of code printed, as text for the model."""

from __future__ import annotations

from headwater.sandbox import Outcome
from headwater.tools.base import ToolResponse

_PROBLEMS = {
    "failed": "the program failed",
    "timed_out": "the program took too long",
    "out_of_memory": "the program used too much memory",
    "too_much_output": "the program printed too much",
    "killed": "the program was killed",
}


def outcome_response(outcome: Outcome) -> ToolResponse:
    """The output of a run in the sandbox."""
    problem = "" if outcome.status == "ok" else outcome.detail or _PROBLEMS[outcome.status]
    if outcome.lost_state:
        problem += "; all variables and files are gone"
    # The traceback of an exception says more than that the program failed.
    shown = problem if outcome.status != "failed" or not outcome.stderr.strip() else ""
    return _response(outcome.stdout, outcome.stderr, shown, is_error=bool(problem), seconds=outcome.seconds)


def code_response(stdout: str, stderr: str, problem: str) -> ToolResponse:
    """The output of a run elsewhere. ``problem`` is shown if the error output does not say what it is."""
    return _response(stdout, stderr, "" if stderr.strip() else problem, is_error=bool(problem))


def _response(stdout: str, stderr: str, shown: str, *, is_error: bool, seconds: float | None = None) -> ToolResponse:
    parts = [stdout.rstrip("\n"), stderr.strip("\n"), f"Error: {shown}" if shown else ""]
    text = "\n".join(part for part in parts if part.strip())
    metrics = {"errors": float(is_error)} | ({} if seconds is None else {"seconds": seconds})
    return ToolResponse(text or "(no output; print the values that you need)", metrics=metrics)
