"""From a row to a ``Prompt``: read the chat and its media, render it with the chat template, tokenise it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.chat.render import (
    RESERVED_ARGUMENTS,
    ChatError,
    Message,
    encode_plain,
    encode_rendered,
    has_template,
    read_messages,
    render_chat,
    split_placeholders,
    without_nones,
)
from headwater.config.schema import DataConfig
from headwater.core.errors import DataError
from headwater.core.media import Media, MediaContent, MediaProcessor
from headwater.core.protocols import Tokenizer
from headwater.core.records import Prompt
from headwater.data.media import PROCESSOR_ERRORS, MediaCache, MediaSettings, load_image, load_video, media_cache
from headwater.data.media_parts import place_media, take_inline_media
from headwater.data.message_media import has_media
from headwater.data.row_store import PlacedRow

ToolsOfRow = Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""From a row's ``extra_info`` and ``tools_kwargs`` to the OpenAI schemas of its tools."""

COLUMNS = ("ground_truth", "reward_model", "extra_info", "tools_kwargs")
"""The columns with a fixed name that become fields of the prompt."""
LoadedMedia = list[tuple[MediaContent, str]]
"""Contents with their places in the data."""


@dataclass(frozen=True)
class PromptBuilder:
    """Builds one prompt from one row, so worker processes and the training process build the same prompt."""

    config: DataConfig
    tokenizer: Tokenizer
    processor: MediaProcessor | None = None
    """For rows with images or videos; None if the model takes only text."""
    tools: ToolsOfRow | None = None
    """The tools that a row offers to the model; None if the run has none. Worker processes receive a copy."""
    cache: MediaCache = field(default_factory=media_cache, compare=False, repr=False)
    media_settings: MediaSettings = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "media_settings", MediaSettings.of(self.config))
        if self.tools is not None and "tools" in self.config.chat_template_args:
            raise DataError(
                "data.chat_template_args.tools: the tools of the run (tools.use, tools.config) are passed to the chat "
                "template already; remove one of the two"
            )
        for name in ("add_generation_prompt", *RESERVED_ARGUMENTS):
            if name in self.config.chat_template_args:
                raise DataError(f"data.chat_template_args.{name}: is fixed for prompts; leave it out")

    def __getstate__(self) -> dict[str, Any]:
        # A process that measures lengths builds every row once.
        return {**self.__dict__, "cache": media_cache(0)}

    def build(self, placed: PlacedRow) -> Prompt:
        """The prompt at its full length. The dataset decides what to do with prompts that are too long."""
        row, place = placed.row, placed.place
        system_prompt = self.config.system_prompt if placed.system_prompt is None else placed.system_prompt
        messages = read_messages(row, self.config.prompt_key, system_prompt, place)
        messages, loaded = self._with_media(messages, placed)
        extra_info = _mapping(row, "extra_info", place)
        tools_kwargs = _tools_kwargs(row, extra_info, place)
        schemas = self._tool_schemas(extra_info, tools_kwargs, place)
        media: Media = ()
        if isinstance(row[self.config.prompt_key], str) and self._is_plain:
            text = row[self.config.prompt_key]
            tokens = self._plain_tokens(text, place, schemas, system_prompt)
        else:
            text = self._render(messages, schemas, place)
            tokens, media = self._tokenize(text, loaded, place)
        if not tokens:
            raise DataError(f"{place}: the chat template renders {self.config.prompt_key} to no tokens; check both")
        return Prompt(
            uid=placed.uid,
            messages=tuple(messages),
            text=text,
            tokens=tokens,
            data_source=_data_source(row, self.config.data_source_key, placed),
            ground_truth=_ground_truth(row, place),
            extra_info=extra_info,
            tools_kwargs=tools_kwargs,
            tool_schemas=schemas,
            media=media,
            columns=self._other_columns(row),
            source=placed.source,
        )

    def holds_media(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has images or videos. They are not loaded, and the row is not checked."""
        columns = [row.get(key) for key in (self.config.image_key, self.config.video_key)]
        if any(value is not None and not (isinstance(value, (list, tuple)) and not value) for value in columns):
            return True
        prompt = row.get(self.config.prompt_key)
        messages = prompt if isinstance(prompt, (list, tuple)) else ()
        return has_media([each for each in messages if isinstance(each, Mapping)])

    def _tool_schemas(
        self, extra_info: Mapping[str, Any], tools_kwargs: Mapping[str, Any], place: str
    ) -> tuple[Mapping[str, Any], ...]:
        try:
            return tuple(self.tools(extra_info, tools_kwargs)) if self.tools is not None else ()
        except DataError as error:
            raise DataError(f"{place}: {error}") from error

    def _other_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Columns that no other field of the prompt holds. A plain string is kept, because its message hides it."""
        config = self.config
        read = {*COLUMNS, config.data_source_key, config.prompt_key, config.image_key, config.video_key}
        others = {key: value for key, value in row.items() if key not in read}
        plain = row[config.prompt_key]
        return {**others, "prompt": plain} if isinstance(plain, str) else others

    @property
    def _is_plain(self) -> bool:
        """Whether prompts that are plain text are used as they are, because no chat template could render them."""
        return self.processor is None and not has_template(self.tokenizer)

    def _plain_tokens(
        self, text: str, place: str, schemas: Sequence[Mapping[str, Any]], system_prompt: str
    ) -> tuple[int, ...]:
        if schemas:
            raise DataError(
                f"{place}: tools need a chat template that tells the model about them, and the model has none; set "
                "model.chat_template, for example to chatml, or remove tools.use and tools.config"
            )
        for key, value in {
            "system_prompt": system_prompt,
            "chat_template_args": self.config.chat_template_args,
        }.items():
            if value:
                raise DataError(
                    f"{place}: data.{key} needs a chat template, and the model has none; set model.chat_template, for "
                    f"example to chatml, or remove data.{key}"
                )
        return encode_plain(self.tokenizer, text)

    def _with_media(self, messages: list[Message], placed: PlacedRow) -> tuple[list[Message], LoadedMedia]:
        keys = {"image": self.config.image_key, "video": self.config.video_key}
        kinds = [kind for kind, key in keys.items() if key in placed.row]
        if not kinds and all(isinstance(message["content"], str) for message in messages):
            return messages, []
        with_parts = split_placeholders(messages, kinds) if kinds else messages
        with_parts, inline = take_inline_media(with_parts, f"{placed.place}: {self.config.prompt_key}")
        values = {kind: place_media(inline[kind], placed, keys[kind], kind, self.config.prompt_key) for kind in keys}
        if not any(values.values()):
            return messages, []
        if self.processor is None:
            _, where = next(item for kind in keys for item in values[kind])
            raise DataError(
                f"{where}: the model takes only text; use a vision model in model.path, or remove the images and videos"
            )
        loaders = {"image": load_image, "video": load_video}
        loaded = [
            (loaders[kind](value, where, placed.folder, self.media_settings, self.cache), where)
            for kind in keys
            for value, where in values[kind]
        ]
        return with_parts, loaded

    def _render(self, messages: list[Message], schemas: Sequence[Mapping[str, Any]], place: str) -> str:
        owner = self.tokenizer if self.processor is None else self.processor.template
        arguments = {**self.config.chat_template_args, **({"tools": list(schemas)} if schemas else {})}
        try:
            return render_chat(owner, messages, arguments)
        except ChatError as error:
            if not error.has_template:
                raise DataError(
                    f"{place}: {self.config.prompt_key} is a list of messages, and {error}; set model.chat_template to "
                    "chatml, plain or a Jinja file, write the prompt as plain text, or use an instruct model"
                ) from error
            raise DataError(
                f"{place}: the chat template refuses {self.config.prompt_key} ({error}); "
                "change the row's messages or data.chat_template_args"
            ) from error

    def _tokenize(self, text: str, loaded: LoadedMedia, place: str) -> tuple[tuple[int, ...], Media]:
        if self.processor is None:
            return encode_rendered(self.tokenizer, text), ()
        try:
            return self.processor.encode(text, [content for content, _ in loaded])
        except PROCESSOR_ERRORS as error:
            for content, where in loaded:
                self._check_alone(content, where)
            raise DataError(f"{place}: the processor refuses the row ({type(error).__name__}: {error})") from error

    def _check_alone(self, content: MediaContent, where: str) -> None:
        """Raise an error with the place of an image or video that the processor does not take by itself."""
        assert self.processor is not None
        try:
            text = self._render([{"role": "user", "content": [{"type": content.kind}]}], (), where)
        except DataError:  # a template that needs other messages says nothing about the image
            return
        try:
            self.processor.encode(text, [content])
        except PROCESSOR_ERRORS as error:
            raise DataError(
                f"{where}: the processor refuses the {content.kind} ({type(error).__name__}: {error}); change it, or "
                "remove it"
            ) from error


def _mapping(row: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    value = row.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise DataError(f"{place}: {key} is a {type(value).__name__}; must be an object, or be left out")
    return dict(value or {})


def _data_source(row: Mapping[str, Any], key: str, placed: PlacedRow) -> str:
    value = row.get(key)
    if value is None:
        return placed.source_name
    if not isinstance(value, str) or not value:
        raise DataError(f"{placed.place}: {key} = {value!r}; must be the name of a scorer, or be left out")
    return value


def _ground_truth(row: Mapping[str, Any], place: str) -> Any:
    nested = _mapping(row, "reward_model", place).get("ground_truth")
    return row.get("ground_truth") if nested is None else nested


def _tools_kwargs(row: Mapping[str, Any], extra_info: Mapping[str, Any], place: str) -> dict[str, Any]:
    nested = without_nones(_mapping(extra_info, "tools_kwargs", f"{place}: extra_info"))
    merged = {**nested, **without_nones(_mapping(row, "tools_kwargs", place))}
    return {tool: without_nones(value) if isinstance(value, Mapping) else value for tool, value in merged.items()}
