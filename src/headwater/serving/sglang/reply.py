"""Replies of ``/generate``. In a stream every event holds the whole response so far, as SGLang's do."""

from __future__ import annotations

from typing import Any

from headwater.core.protocols import Tokenizer
from headwater.core.records import SamplingParams, StopReason
from headwater.serving.output import Piece, token_text
from headwater.serving.sglang.request import Sample

_ABORTED = "the request was aborted by a control call"


class GenerateReply:
    """Gathers the pieces of one response."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer) -> None:
        self._sample = sample
        self._tokenizer = tokenizer
        self._text = ""
        self._tokens: list[int] = []
        self._versions: list[int] = []
        self._logprobs: list[tuple[float, int, str | None]] = []
        self._finish: dict[str, Any] | None = None

    def add(self, piece: Piece) -> None:
        self._text += piece.text
        self._tokens.extend(piece.tokens)
        self._versions.extend(piece.versions)
        if self._sample.logprobs:
            for logprob, token in zip(piece.logprobs, piece.tokens, strict=True):
                text = token_text(self._tokenizer, token) if self._sample.token_texts else None
                self._logprobs.append((logprob, token, text))
        if piece.stop_reason is not None:
            self._finish = finish_reason(piece.stop_reason, piece.matched, self._sample.request.sampling)

    def body(self, version: int, **extra: Any) -> dict[str, Any]:
        """``version`` is the engine's, for a response that has no token yet."""
        request = self._sample.request
        meta_info: dict[str, Any] = {
            "id": self._sample.name,
            "finish_reason": self._finish,
            "prompt_tokens": len(request.input_tokens),
            "completion_tokens": len(self._tokens),
            "weight_version": str(self._versions[-1] if self._versions else version),
            "output_versions": self._versions,
        }
        if self._sample.logprobs:
            meta_info["output_token_logprobs"] = self._logprobs
        return {"text": self._text, "output_ids": self._tokens, "meta_info": {**meta_info, **extra}}


def finish_reason(
    stop_reason: StopReason, matched: str | int | None, sampling: SamplingParams
) -> dict[str, str | int | None]:
    if stop_reason == "length":
        return {"type": "length", "length": sampling.max_new_tokens}
    if stop_reason == "abort":
        return {"type": "abort", "message": _ABORTED}
    return {"type": "stop", "matched": matched}
