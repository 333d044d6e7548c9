"""The built-in chat templates: those of the built-in models, and those that ``model.chat_template`` names.

A template is a head, which defines the markers of a message, and a common body. ``{% generation %}`` encloses what the
assistant generates, including its end token, so ``return_assistant_tokens_mask=True`` works. Only ``plain`` has no
markers. A ``brief`` head names only the arguments of a tool: the whole schema would be most of a tiny model's prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.chat.render import ChatError, render_chat
from headwater.core.errors import ModelError
from headwater.core.registry import nearest

_TINY_HEAD = """\
{%- set before, after, end, gap = "<|", "|>", "<|end|>", "" -%}
{%- set default_system, brief = "", true -%}
"""

_CHATML_HEAD = """\
{%- set before, after, end, gap = "<|im_start|>", "\\n", "<|im_end|>", "\\n" -%}
"""

_SMOLLM_HEAD = """\
{%- set default_system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face" -%}
"""

_TEXT_OF = """\
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable -%}
        {%- for part in content -%}
            {%- if part.type == "text" -%}
                {{- part.text -}}
            {%- elif image_mark and part.type in ["image", "image_url"] -%}
                {{- image_mark -}}
            {%- elif video_mark and part.type in ["video", "video_url"] -%}
                {{- video_mark -}}
            {%- else -%}
                {%- set accepted = "text, images and videos" if image_mark else "text" -%}
                {{- raise_exception("this model accepts only " ~ accepted ~ "; found a part of type " ~ part.type) -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
"""

_BODY = (
    _TEXT_OF
    + """\
{%- if default_system and (not messages or messages[0].role != "system") -%}
    {{- before ~ "system" ~ after ~ default_system ~ end ~ gap -}}
{%- endif -%}
{%- if tools -%}
    {{- before ~ "system" ~ after ~ "Tools:" -}}
    {%- for tool in tools -%}
        {%- set function = tool.function or tool -%}
        {%- if brief -%}
            {{- "\\n" ~ function.name ~ "(" ~ ((function.parameters or {}).properties or {}) | join(", ") ~ ")" -}}
        {%- else -%}
            {{- "\\n" ~ (tool | tojson) -}}
        {%- endif -%}
    {%- endfor -%}
    {{- end ~ gap -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in ["system", "user", "assistant", "tool"] -%}
        {{- raise_exception("unknown role " ~ message.role ~ "; known: system, user, assistant, tool") -}}
    {%- endif -%}
    {{- before ~ message.role ~ after -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}
        {{- text_of(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {{- "<tool_call>" ~ ((call.function or call) | tojson) ~ "</tool_call>" -}}
        {%- endfor -%}
        {{- end -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- text_of(message.content) ~ end -}}
    {%- endif -%}
    {{- gap -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- before ~ "assistant" ~ after -}}
{%- endif -%}
"""
)

TINY_TEMPLATE = _TINY_HEAD + _BODY
"""``<|user|>What is 7 + 5?<|end|><|assistant|>``"""


def vision_template(image_mark: str, video_mark: str) -> str:
    """The tiny template, with what a vision model reads in place of an image or video."""
    marks = f'{{%- set image_mark, video_mark = "{image_mark}", "{video_mark}" -%}}\n'
    return marks + TINY_TEMPLATE


CHATML_TEMPLATE = _CHATML_HEAD + _SMOLLM_HEAD + _BODY
"""The template that SmolLM2 was trained with, including its default system message."""

_PLAIN = (
    _TEXT_OF
    + """\
{{- bos_token -}}
{%- if tools -%}
    {{- raise_exception("the template plain has no place for tools") -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.tool_calls -%}
        {{- raise_exception("the template plain has no place for tool calls") -}}
    {%- elif message.role == "assistant" -%}
        {%- generation -%}{{- text_of(message.content) -}}{%- endgeneration -%}
    {%- else -%}
        {{- text_of(message.content) -}}
    {%- endif -%}
    {{- "\\n" -}}
{%- endfor -%}
"""
)

CHAT_TEMPLATES = {"chatml": _CHATML_HEAD + _BODY, "plain": _PLAIN}
"""Templates for models without one, by name: ``chatml`` marks roles with <|im_start|> and <|im_end|>, ``plain`` writes
the text of each message on separate lines, without roles."""


def set_template(owner: Any, name: str) -> None:
    """Give a tokenizer or processor the template ``name``: a built-in one, or the path of a Jinja file."""
    owner.chat_template = CHAT_TEMPLATES.get(name) or _read(name)
    try:
        render_chat(owner, [{"role": "user", "content": "Hello"}])
    except ChatError as error:
        raise ModelError(f"model.chat_template = {name}: cannot render a chat ({error}); fix the template") from error


def _read(name: str) -> str:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ModelError(
            f"model.chat_template = {name}: neither a built-in template nor a file (looked in {Path.cwd()}); "
            f"{nearest(name, list(CHAT_TEMPLATES))}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"model.chat_template = {name}: cannot be read ({error}); give a Jinja file") from error
    if not text.strip():
        raise ModelError(f"model.chat_template = {name}: the file is empty; give a Jinja file")
    return text
