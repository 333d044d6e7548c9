"""One call of transformers' ``generate`` for requests with the same sampling settings.

Headwater's sampler draws the tokens inside the generation loop, so the randomness of a request does not depend on its
neighbours, and the log-prob of every token is recorded when it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from headwater.core.errors import RequestError
from headwater.core.requests import Alternatives, ModelRequest, ModelResponse, SamplingParams
from headwater.engine.grammar import Grammars
from headwater.engine.guides import Guidance, Guide, alternatives
from headwater.engine.sampler import SamplingBatch, distribution, sample
from headwater.engine.stops import find_stop
from headwater.models.load import end_token_ids
from headwater.models.vision import VisionProcessor


class _Draw(LogitsProcessor):  # type: ignore[misc]
    """Draws the next tokens with Headwater's sampler, and makes them the only tokens that ``generate`` can choose."""

    def __init__(self, batch: SamplingBatch, prompt_width: int, guides: Sequence[Guide]) -> None:
        self._batch = batch
        self._prompt_width = prompt_width
        """Excludes given tokens of the response: randomness depends on the position in the response."""
        self._guides = guides
        self.logprobs: list[Tensor] = []
        self.top: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self._prompt_width
        logits = self._guided(input_ids, scores) if self._guides else scores
        tokens, logprobs = sample(logits, self._batch, torch.full_like(self._batch.keys, position))
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)

    def _guided(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for guide, tokens in zip(self._guides, input_ids[:, self._prompt_width :].tolist(), strict=True):
            guide.advance(tokens)
        guidance = Guidance.of(list(enumerate(self._guides)))
        logits = guidance.adjust(scores)
        if guidance.num_top:
            likely = distribution(logits, self._batch).topk(guidance.num_top, dim=-1)
            self.top.append((likely.indices.cpu(), likely.values.cpu()))
        return logits

    def alternatives(self, row: int, count: int) -> tuple[Alternatives, ...]:
        """Those of the first ``count`` tokens of a row."""
        if not self.top:
            return ()
        wanted = self._guides[row].request.sampling.num_top_logprobs
        return tuple(alternatives(tokens[row], logprobs[row], wanted) for tokens, logprobs in self.top[:count])


class _Abandoned(StoppingCriteria):  # type: ignore[misc]
    """Ends a ``generate`` call when no caller waits for its responses any more, as after Ctrl-C."""

    def __init__(self, is_abandoned: Callable[[], bool]) -> None:
        self._is_abandoned = is_abandoned

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self._is_abandoned(), device=input_ids.device)


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """Ends rows at their stop strings."""

    def __init__(self, generator: HfGenerator, requests: Sequence[ModelRequest], width: int) -> None:
        self._generator = generator
        self._requests = requests
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        outputs = input_ids[:, self._width :].tolist()
        ended = [
            self._generator.end_of(request, output) is not None
            for request, output in zip(self._requests, outputs, strict=True)
        ]
        return torch.tensor(ended, device=input_ids.device)


class HfGenerator:
    """Generates responses with a model."""

    def __init__(self, model: Any, tokenizer: Any, processor: VisionProcessor | None = None) -> None:
        self._model = model
        self._processor = processor
        self._tokenizer = tokenizer
        self._pad_token_id = tokenizer.pad_token_id
        self._end_token_ids = end_token_ids(model, tokenizer)
        self.grammars = Grammars(tokenizer, model.config.get_text_config().vocab_size, self._end_token_ids)
        # The model's generation settings, such as a repetition penalty, would change the distribution that is sampled.
        model.generation_config = GenerationConfig()

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[ModelRequest], version: int, is_abandoned: Callable[[], bool]
    ) -> list[ModelResponse]:
        """Responses to requests with equal sampling settings, equally many given tokens and the same pictures.

        ``version`` is the policy version of the weights.
        """
        params, num_given = requests[0].sampling, len(requests[0].given_tokens)
        stopping: list[StoppingCriteria] = [_Abandoned(is_abandoned)]
        input_ids, attention_mask = self._pad(requests)
        width = input_ids.shape[1]
        settings = SamplingBatch.build(
            [request.sampling for request in requests], [request.rng_key for request in requests], input_ids.device
        )
        guides = [self._guide(request) for request in requests] if params.uses_guide else []
        draw = _Draw(settings, width - num_given, guides)
        if params.stop_strings:
            stopping.append(_Ended(self, requests, width))
        sequences = self._model.generate(
            input_ids,
            attention_mask=attention_mask,
            **self._media_inputs(requests, width),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList(stopping),
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=params.max_new_tokens - num_given,
            min_new_tokens=max(0, params.min_new_tokens - num_given) or None,
            eos_token_id=list(self._stop_ids(params)) or None,
            pad_token_id=self._pad_token_id,
        )
        outputs = sequences[:, width:].tolist()
        logprobs = torch.stack(draw.logprobs, dim=1).tolist()
        return [
            self._response(request, outputs[row], logprobs[row], version, draw, row)
            for row, request in enumerate(requests)
        ]

    def check_placeholders(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` if a placeholder token is text: transformers finds media by these tokens.

        It is also raised if the response would begin directly after media with a grid, because ``generate`` would give
        it wrong rotary positions.
        """
        config = self._model.config
        marks = {getattr(config, name, None) for name in ("image_token_id", "video_token_id")}
        tokens = np.array(request.input_tokens + request.given_tokens)
        for item in request.media:
            tokens[item.places()] = -1
        if any(any(block.grid) and block.start + block.length == len(tokens) for block in request.media[-1].blocks):
            raise RequestError(
                f"request {request.request_id}: the prompt ends with media, after which the hf backend cannot "
                "continue; let text follow, or use rollout.backend=embedded"
            )
        place = next((place for place, token in enumerate(tokens.tolist()) if token in marks), None)
        if place is not None:
            raise RequestError(
                f"request {request.request_id}: token {tokens[place]} at position {place} stands for media elsewhere "
                "and is text here, which the hf backend cannot express; use rollout.backend=embedded"
            )

    def _media_inputs(self, requests: Sequence[ModelRequest], width: int) -> dict[str, Tensor]:
        """The pictures, once for every request, which tokens stand for them, and the rotary positions of all tokens.

        ``generate`` gives every new token the position after that of the token before it.
        """
        if hasattr(self._model.base_model, "rope_deltas"):
            self._model.base_model.rope_deltas = None  # those of the previous call
        if not requests[0].media:
            return {}
        assert self._processor is not None, "only a model with a processor accepts media"
        rows = [self._processor.model_inputs(each.input_tokens + each.given_tokens, each.media) for each in requests]
        made: dict[str, Tensor] = {}
        for name in rows[0].keys() - {"input_ids"}:
            values = [row[name] for row in rows]
            if name in ("mm_token_type_ids", "position_ids"):
                values = [F.pad(each, (width - each.shape[-1], 0)) for each in values]
            made[name] = torch.cat(values, dim=1 if name == "position_ids" else 0).to(self._model.device)
        return made

    def given_whole(self, request: ModelRequest) -> ModelResponse | None:
        """The answer to a request whose given tokens are already a complete response."""
        given = request.given_tokens
        has_stopped = bool(given) and self.end_of(replace(request, given_tokens=given[:-1]), given[-1:]) is not None
        if has_stopped or len(given) >= request.sampling.max_new_tokens:
            return ModelResponse(request.input_tokens, (), (), (), "stop" if has_stopped else "length")
        return None

    def end_of(self, request: ModelRequest, output: Sequence[int]) -> int | None:
        """The number of tokens after the given ones at which the response stops; ``None`` if it does not stop."""
        params, num_given = request.sampling, len(request.given_tokens)
        first = min(max(0, params.min_new_tokens - num_given), len(output))
        stop_ids = self._stop_ids(params)
        ends = [place + 1 for place in range(first, len(output)) if output[place] in stop_ids][:1]
        if params.stop_strings:
            tokens = [*request.given_tokens, *output]
            found = find_stop(self._tokenizer, tokens, num_given + first, params.stop_strings)
            ends += [found - num_given] if found is not None else []
        return min(ends, default=None)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own_ends = () if params.ignore_end else self._end_token_ids
        return (*own_ends, *params.stop_token_ids)

    def _guide(self, request: ModelRequest) -> Guide:
        grammar = request.sampling.grammar
        return Guide(request, None if grammar is None else self.grammars.start(grammar))

    def _pad(self, requests: Sequence[ModelRequest]) -> tuple[Tensor, Tensor]:
        rows = [request.input_tokens + request.given_tokens for request in requests]
        width = max(map(len, rows))
        shape = (len(rows), width)
        input_ids = torch.full(shape, self._pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        for row, tokens in enumerate(rows):
            input_ids[row, width - len(tokens) :] = torch.tensor(tokens)
            attention_mask[row, width - len(tokens) :] = 1
        device = self._model.device
        return input_ids.to(device), attention_mask.to(device)

    def _response(
        self, request: ModelRequest, output: list[int], logprobs: list[float], version: int, draw: _Draw, row: int
    ) -> ModelResponse:
        # generate pads a row after its end token; the end token belongs to the response.
        end = self.end_of(request, output)
        count = end if end is not None else len(output)
        return ModelResponse(
            input_tokens=request.input_tokens,
            output_tokens=tuple(output[:count]),
            output_logprobs=tuple(logprobs[:count]),
            output_versions=(version,) * count,
            stop_reason="length" if end is None else "stop",
            output_top_logprobs=draw.alternatives(row, count),
        )
