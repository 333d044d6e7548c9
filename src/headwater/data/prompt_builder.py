"""From a row to a ``Prompt``: read the chat, render it with the chat template, tokenise it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from headwater.config.schema import DataConfig
from headwater.core.errors import DataError
from headwater.core.protocols import Tokenizer
from headwater.core.records import Prompt
from headwater.data.chat import Message, count_parts, read_messages, split_placeholders, without_nones
from headwater.data.media import as_list, load_image, load_video
from headwater.data.row_store import PlacedRow

FIXED_TEMPLATE_ARGUMENTS = {"add_generation_prompt": True, "tokenize": False}


@dataclass(frozen=True)
class PromptBuilder:
    """Depends on one row at a time, so that worker processes and the training process build the same prompt."""

    config: DataConfig
    tokenizer: Tokenizer
    processor: Any = None
    """A transformers processor, for rows with images or videos."""

    def __post_init__(self) -> None:
        for name in FIXED_TEMPLATE_ARGUMENTS:
            if name in self.config.chat_template_args:
                raise DataError(f"data.chat_template_args.{name}: is fixed for prompts; leave it out")

    def build(self, placed: PlacedRow) -> Prompt:
        """The prompt at its full length; the policy for overlong prompts is the dataset's."""
        row, place = placed.row, placed.place
        messages = read_messages(row, self.config.prompt_key, self.config.system_prompt, place)
        messages, multi_modal = self._with_media(messages, placed)
        text = self._render(messages, place)
        tokens = self._tokenize(text, multi_modal, place)
        if not tokens:
            raise DataError(f"{place}: the chat template renders {self.config.prompt_key} to no tokens; check both")
        extra_info = _mapping(row, "extra_info", place)
        return Prompt(
            uid=placed.uid,
            messages=tuple(messages),
            text=text,
            tokens=tuple(tokens),
            data_source=_data_source(row, placed),
            ground_truth=_ground_truth(row, place),
            extra_info=extra_info,
            tools_kwargs=_tools_kwargs(row, extra_info, place),
            multi_modal=multi_modal,
        )

    def _with_media(
        self, messages: list[Message], placed: PlacedRow
    ) -> tuple[list[Message], dict[str, tuple[Any, ...]]]:
        keys = {"image": self.config.image_key, "video": self.config.video_key}
        kinds = [kind for kind, key in keys.items() if key in placed.row]
        with_parts = split_placeholders(messages, kinds) if kinds else messages
        values = {kind: as_list(placed.row.get(key)) for kind, key in keys.items()}
        for kind, key in keys.items():
            num_parts, num_values = count_parts(with_parts, kind), len(values[kind])
            if num_parts != num_values:
                raise DataError(
                    f"{placed.place}: {self.config.prompt_key} has {num_parts} <{kind}> and {key} holds {num_values}; "
                    f"write one <{kind}> per {kind}, and name their column in data.{kind}_key"
                )
        if not any(values.values()):
            return messages, {}
        if self.processor is None:
            raise DataError(
                f"{placed.place}: the row has images or videos, but no processor was loaded; "
                "use a vision model, or remove the column"
            )
        multi_modal: dict[str, tuple[Any, ...]] = {}
        for kind, load in (("image", load_image), ("video", load_video)):
            if values[kind]:
                where = f"{placed.place}: {keys[kind]}"
                loaded = [load(item, f"{where}[{i}]", placed.folder) for i, item in enumerate(values[kind])]
                multi_modal[f"{kind}s"] = tuple(loaded)
        return with_parts, multi_modal

    def _render(self, messages: list[Message], place: str) -> str:
        renderer = self.tokenizer if self.processor is None else self.processor
        arguments = {**FIXED_TEMPLATE_ARGUMENTS, **self.config.chat_template_args}
        try:
            text = renderer.apply_chat_template(messages, **arguments)
        except (TemplateError, TypeError, ValueError, AttributeError) as error:
            if not getattr(renderer, "chat_template", "unknown"):
                raise DataError(
                    f"{place}: {type(renderer).__name__} has no chat template; "
                    "use an instruct model, or set tokenizer.chat_template"
                ) from error
            raise DataError(
                f"{place}: the chat template refuses {self.config.prompt_key} ({type(error).__name__}: {error}); "
                "change the row's messages or data.chat_template_args"
            ) from error
        return str(text)

    def _tokenize(self, text: str, multi_modal: Mapping[str, Any], place: str) -> list[int]:
        # The template already wrote the special tokens; the tokenizer must not add a second beginning-of-text.
        if self.processor is None:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        media = {kind: list(values) for kind, values in multi_modal.items()}
        try:
            encoded = self.processor(text=[text], add_special_tokens=False, **media)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"{place}: the processor refuses the row ({type(error).__name__}: {error})") from error
        return [int(token) for token in encoded["input_ids"][0]]


def _mapping(row: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    value = row.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise DataError(f"{place}: {key} is a {type(value).__name__}; must be an object, or be left out")
    return dict(value or {})


def _data_source(row: Mapping[str, Any], placed: PlacedRow) -> str:
    value = row.get("data_source")
    if value is None:
        return placed.source_name
    if not isinstance(value, str) or not value:
        raise DataError(f"{placed.place}: data_source = {value!r}; must be the name of a scorer, or be left out")
    return value


def _ground_truth(row: Mapping[str, Any], place: str) -> Any:
    nested = _mapping(row, "reward_model", place).get("ground_truth")
    return row.get("ground_truth") if nested is None else nested


def _tools_kwargs(row: Mapping[str, Any], extra_info: Mapping[str, Any], place: str) -> dict[str, Any]:
    nested = without_nones(_mapping(extra_info, "tools_kwargs", f"{place}: extra_info"))
    merged = {**nested, **without_nones(_mapping(row, "tools_kwargs", place))}
    return {tool: without_nones(value) if isinstance(value, Mapping) else value for tool, value in merged.items()}
