"""The chat templates of the built-in models.

Each template is a head, which defines the markers of a message, and a common body. ``{% generation %}`` encloses what
the assistant generates, including its end token, so ``return_assistant_tokens_mask=True`` works.
"""

from __future__ import annotations

_TINY_HEAD = """\
{%- set before, after, end, gap = "<|", "|>", "<|end|>", "" -%}
{%- set default_system = "" -%}
"""

_CHATML_HEAD = """\
{%- set before, after, end, gap = "<|im_start|>", "\\n", "<|im_end|>", "\\n" -%}
{%- set default_system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face" -%}
"""

_BODY = """\
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable -%}
        {%- for part in content -%}
            {%- if part.type != "text" -%}
                {{- raise_exception("this model accepts only text; found a part of type " ~ part.type) -}}
            {%- endif -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if default_system and (not messages or messages[0].role != "system") -%}
    {{- before ~ "system" ~ after ~ default_system ~ end ~ gap -}}
{%- endif -%}
{%- if tools -%}
    {{- before ~ "system" ~ after ~ "Tools:" -}}
    {%- for tool in tools -%}
        {{- "\\n" ~ (tool | tojson) -}}
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

TINY_TEMPLATE = _TINY_HEAD + _BODY
"""``<|user|>What is 7 + 5?<|end|><|assistant|>``"""

CHATML_TEMPLATE = _CHATML_HEAD + _BODY
"""The template that SmolLM2 was trained with, including its default system message."""
