"""What an engine can never serve, refused before it is queued."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.errors import RequestError
from headwater.core.records import ModelRequest, wrong_stop

_MAX_FORBIDDEN = 1024
"""Stop tokens that the device keeps a list of for every sequence, to forbid them for a while."""

_LEAST_TEMPERATURE = 1e-6
_GREATEST_TEMPERATURE = 1e6
"""Tokens are equally likely long before; what float32 calls infinite would turn forbidden tokens into NaN."""


@dataclass(frozen=True)
class RequestLimits:
    vocab_size: int
    max_model_tokens: int
    page_tokens: int
    num_pages: int

    @property
    def max_request_tokens(self) -> int:
        """The most that the prompt and the new tokens of one request may come to."""
        # As ``check`` counts pages: one is for the copy, and the last token is never fed back.
        return min(self.max_model_tokens, (self.num_pages - 1) * self.page_tokens + 1)

    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for a request that this engine can never serve."""
        tokens = request.input_tokens + request.given_tokens
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise RequestError(
                f"request {request.request_id}: token id {wrong} is outside the vocabulary of {self.vocab_size}; "
                "use the tokenizer the model was trained with"
            )
        self._check_sampling(request)
        # Given tokens are the first of the new ones.
        num_prompt, num_new = len(request.input_tokens), request.sampling.max_new_tokens
        if num_prompt + num_new > self.max_model_tokens:
            raise RequestError(
                f"request {request.request_id}: {num_prompt} prompt tokens + {num_new} new tokens exceed the model's "
                f"{self.max_model_tokens} positions; shorten the prompt or lower max_new_tokens"
            )
        # One page more: the samples of a prompt each copy its last page.
        num_pages = -(-(num_prompt + num_new - 1) // self.page_tokens) + 1
        if num_pages > self.num_pages:
            raise RequestError(
                f"request {request.request_id}: {num_prompt} prompt tokens + {num_new} new tokens need {num_pages} "
                f"pages of the KV cache, which has {self.num_pages}; raise engine.kv_cache_gib"
            )

    def _check_sampling(self, request: ModelRequest) -> None:
        """What a record may hold but the device's tensors may not: one such request would end the loop."""
        sampling, name = request.sampling, f"request {request.request_id}"
        unknown = [token for token in sampling.stop_token_ids if not 0 <= token < self.vocab_size]
        if unknown:
            raise RequestError(f"{name}: stop token id {unknown[0]} is outside the vocabulary of {self.vocab_size}")
        if sampling.min_new_tokens and len(sampling.stop_token_ids) > _MAX_FORBIDDEN:
            raise RequestError(
                f"{name}: {len(sampling.stop_token_ids)} stop token ids: at most {_MAX_FORBIDDEN} go with "
                f"min_new_tokens = {sampling.min_new_tokens}; name fewer, or use min_new_tokens = 0"
            )
        if (wrong := wrong_stop(sampling.stop_strings)) is not None:
            raise RequestError(f"{name}: stop_strings{wrong}")
        if not -(2**63) <= request.rng_key < 2**63:
            raise RequestError(f"{name}: rng_key = {request.rng_key}: must be a signed 64-bit number")
        if sampling.top_k >= 2**63:
            raise RequestError(f"{name}: top_k = {sampling.top_k}: must be < 2**63; use 0 to keep all tokens")
        if 0 < sampling.temperature < _LEAST_TEMPERATURE:
            raise RequestError(
                f"{name}: temperature = {sampling.temperature:g}: must be 0 for greedy, or >= {_LEAST_TEMPERATURE:g}"
            )
        if sampling.temperature > _GREATEST_TEMPERATURE:
            raise RequestError(
                f"{name}: temperature = {sampling.temperature:g}: must be <= {_GREATEST_TEMPERATURE:g}, "
                "where all tokens are equally likely already"
            )
