"""``Engine``: generate with a model from Python, with the engine that training uses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

from headwater.config.load import load_config
from headwater.core.errors import HeadwaterError, ModelError
from headwater.core.media import Media
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams, StopReason, derive_key
from headwater.core.waits import wait_for_future
from headwater.models.source import check_model
from headwater.observe.run_directory import RunDirectory

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, tokens, or a chat."""
Prompts = Prompt | Sequence[Prompt]

_LIMIT_S = 24 * 3600.0


@dataclass(frozen=True)
class Completion:
    """One response."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per token, under the distribution that it was sampled from."""
    stop_reason: StopReason
    """``stop`` if the model ended the response, ``length`` if it reached ``max_new_tokens``."""

    def __str__(self) -> str:
        return self.text


class Engine:
    """A model in memory.

        engine = Engine("smollm2")                        # or a folder, a hub id, a run directory, tiny:<preset>
        engine.generate("The capital of France is", max_new_tokens=8, temperature=0)
        engine.chat("What is 7 + 5?").text
        engine.chat([{"role": "user", "content": "What is 7 + 5?"}], temperature=0)
        engine.chat("What is this?", images=["cat.png"])  # a vision model; also Pillow images, bytes and data URLs
        engine.close()                                    # or: with Engine("smollm2") as engine

    A list of prompts is generated in one batch and gives a list. It works in scripts and notebooks, also while an
    event loop runs.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        backend: str = "embedded",
        device: str = "auto",
        dtype: str = "auto",
        seed: int = 0,
        chat_template: str = "",
        **settings: Any,
    ) -> None:
        """``settings`` are those of the section ``engine``, for example ``max_sequences=64``."""
        config = load_config(None, [{"engine": settings, "model": {"dtype": dtype, "device": device}}]).config
        path = _model_path(model)
        check_model(path, "model")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it would print warnings after a fork
        from headwater.backends import BACKENDS
        from headwater.models.load import load_processor, load_tokenizer
        from headwater.rollout.dispatcher import AsyncTaskRunner

        made = BACKENDS.resolve(backend)
        if not hasattr(made, "load"):
            raise HeadwaterError(f"backend = {backend!r}: has no method load; use embedded or hf")
        self.tokenizer = load_tokenizer(path, chat_template=chat_template)
        self._engine = made.load(path, config.engine, tokenizer=self.tokenizer, dtype=dtype, device=device, seed=seed)
        self._processor = load_processor(path, chat_template)
        self._tasks = AsyncTaskRunner()
        self._seed = seed
        self._num_requests = 0

    @overload
    def generate(self, prompts: str, **sampling: Any) -> Completion: ...

    @overload
    def generate(self, prompts: Sequence[str], **sampling: Any) -> list[Completion]: ...

    @overload
    def generate(self, prompts: Prompts, **sampling: Any) -> Completion | list[Completion]: ...

    def generate(
        self, prompts: Prompts, *, images: Sequence[Any] | None = None, seed: int | None = None, **sampling: Any
    ) -> Completion | list[Completion]:
        """Continue text as it is, without a chat template. A chat, which is a list of messages, is rendered.

        ``images`` are those of one prompt, or a list of them for each prompt. They replace the model's own placeholders
        in a text, and ``{"type": "image"}`` parts in a chat. Parts may also hold their image.

        ``sampling`` are the fields of ``SamplingParams``: ``max_new_tokens`` (default 256), ``temperature`` (1.0),
        ``top_p``, ``top_k``, ``min_p``, ``stop_strings`` and others. With the same ``seed``, the same prompts give the
        same responses.
        """
        if _is_one(prompts):
            return self._run([prompts], [images], seed, sampling)[0]
        return self._run(list(prompts), _of_each(images, len(prompts)), seed, sampling)

    @overload
    def chat(self, messages: str | Sequence[Message], **sampling: Any) -> Completion: ...

    @overload
    def chat(self, messages: Sequence[str] | Sequence[Sequence[Message]], **sampling: Any) -> list[Completion]: ...

    def chat(
        self, messages: Any, *, images: Sequence[Any] | None = None, seed: int | None = None, **sampling: Any
    ) -> Completion | list[Completion]:
        """The model's reply to a chat: a list of messages, or the text of a user. A list of chats gives a list.

        ``images`` are those of one chat, or a list of them for each chat. In the text of a user they stand where it
        says ``<image>``, or else before the text.
        """
        if _is_one(messages):
            return self._run([_as_chat(messages, images)], [images], seed, sampling)[0]
        several = _of_each(images, len(messages))
        chats = [_as_chat(each, shown) for each, shown in zip(messages, several, strict=True)]
        return self._run(chats, several, seed, sampling)

    def close(self) -> None:
        """Release the memory of the model."""
        if self._tasks.is_open:
            self._tasks.close()
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Any],
        images: Sequence[Sequence[Any] | None],
        seed: int | None,
        sampling: Mapping[str, Any],
    ) -> list[Completion]:
        if not self._tasks.is_open:
            raise HeadwaterError("the engine is closed; make a new one")
        params = _sampling(sampling)
        # Without a seed, every call of the same prompts gives new responses.
        first = self._num_requests if seed is None else 0
        keys = (derive_key(self._seed if seed is None else seed, "api", first + at) for at in range(len(prompts)))
        self._num_requests += len(prompts)
        requests = []
        for at, (prompt, shown, key) in enumerate(zip(prompts, images, keys, strict=True)):
            tokens, media = self._tokens(prompt, shown or ())
            requests.append(ModelRequest(f"api-{first + at}", tokens, params, key, media=media))
        # All of them are submitted before any is awaited, so that they are one batch.
        futures = [self._tasks.start(self._engine.agenerate(request)) for request in requests]
        what = f"{len(futures)} responses of {params.max_new_tokens} tokens at most"
        try:
            return [
                self._completion(wait_for_future(each, lambda: what, kind="generation", hard_limit_s=_LIMIT_S))
                for each in futures
            ]
        except BaseException:  # after an interrupt or a failed request, the other responses are not needed
            for each in futures:
                each.cancel()
            raise

    def _tokens(self, prompt: Any, images: Sequence[Any]) -> tuple[tuple[int, ...], Media]:
        from headwater.chat.render import encode_plain, encode_rendered, render_chat
        from headwater.data.media import load_image
        from headwater.data.message_media import has_media, load_message_media, take_message_media

        is_chat = bool(prompt) and not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
        if self._processor is None and (images or (is_chat and has_media(prompt))):
            raise HeadwaterError("images: the model takes only text; use a vision model, or remove them")
        contents = [load_image(each, f"images[{number}]", None) for number, each in enumerate(images)]
        if is_chat:
            given = [{"type": "image", "image": each} for each in contents]
            messages, contents = take_message_media(load_message_media(_filled(prompt, given), "messages"))
            owner = self.tokenizer if self._processor is None else self._processor.template
            prompt = render_chat(owner, messages, {})
            if not contents:
                return encode_rendered(self.tokenizer, prompt), ()
        if self._processor is not None and contents:
            try:
                return self._processor.encode(prompt, contents)
            except ValueError as error:
                raise HeadwaterError(f"images: {error}") from error
        return (encode_plain(self.tokenizer, prompt) if isinstance(prompt, str) else tuple(map(int, prompt))), ()

    def _completion(self, response: ModelResponse) -> Completion:
        text = self.tokenizer.decode(list(response.output_tokens), skip_special_tokens=True)
        return Completion(text, response.output_tokens, response.output_logprobs, response.stop_reason)


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
    values = {"max_new_tokens": 256, **given}
    for name in ("stop_strings", "stop_token_ids"):
        if name in values:
            value = values[name]
            values[name] = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise HeadwaterError(f"generate: {error}") from error


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, Mapping)))


def _of_each(images: Sequence[Any] | None, count: int) -> Sequence[Sequence[Any] | None]:
    if images is None:
        return [None] * count
    if len(images) != count or not all(isinstance(each, (list, tuple)) for each in images):
        raise HeadwaterError(f"images: must be a list of {count} lists, one for each prompt")
    return images


def _as_chat(messages: Any, images: Sequence[Any] | None) -> Any:
    """A chat. The text of a user with images becomes parts, which ``images`` fill."""
    if not isinstance(messages, str):
        return messages
    if not images:
        return [{"role": "user", "content": messages}]
    from headwater.chat.render import split_placeholders

    text = messages if "<image>" in messages else "<image>" * len(images) + messages
    return split_placeholders([{"role": "user", "content": text}], ["image"])


def _filled(messages: Sequence[Message], images: list[dict[str, Any]]) -> list[Message]:
    """The messages with ``images`` in the parts of images that hold none."""
    left = list(images)
    num_empty = sum(part == {"type": "image"} for message in messages for part in _parts(message))
    if num_empty != len(images):
        raise HeadwaterError(f"images: the chat has {num_empty} parts for the {len(images)} images; write one for each")
    return [
        {**message, "content": [left.pop(0) if part == {"type": "image"} else part for part in parts]}
        if (parts := _parts(message))
        else message
        for message in messages
    ]


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else ()


def _model_path(model: str | os.PathLike[str]) -> str:
    """The model itself, or the newest one of a run directory."""
    folder = Path(model).expanduser()
    if not (folder / "config.yaml").is_file() or (folder / "config.json").is_file():
        return os.fspath(model)
    run = RunDirectory(folder)
    if not (steps := run.checkpoint_steps()):
        raise ModelError(f"{folder}: is a run directory without a checkpoint, so it has no model yet")
    return str(run.model(steps[-1]))
