"""Chat templates that follow the rules of well-known models' own, in our words, and small tokenizers for them.

Each has what makes the tokens between two turns hard to find: Qwen 2.5 has a default system message, Qwen 3 strips
earlier reasoning, Llama 3 shows the tools in the first user message, Llama 3 and Mistral hide the content of a message
with calls, Mistral shows the tools and the system message in the last user message, Mistral and Gemma refuse two
messages of one role, Gemma 2 refuses a system message, Gemma knows no tools, and GLM has no end token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerFast

from headwater.models.load import load_tokenizer

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""

_QWEN_TOOLS = """\
{%- if tools -%}
{{ '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') + '<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{ '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif -%}
"""

_QWEN2_DEFAULT = """\
{%- if not tools and messages[0].role != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful model.<|im_end|>\\n' }}
{%- endif -%}
"""

_QWEN_CALLS = """\
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{%- if content or not loop.first %}{{ '\\n' }}{% endif -%}
{{ '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}"""

_QWEN_RESULT = """\
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}"""

QWEN2 = (
    _QWEN_TOOLS
    + _QWEN2_DEFAULT
    + """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}
{%- set content = message.content or '' -%}
{{ '<|im_start|>assistant\\n' + content }}"""
    + _QWEN_CALLS
    + "{%- elif message.role == 'tool' -%}"
    + _QWEN_RESULT
    + """\
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
)

QWEN3 = (
    _QWEN_TOOLS
    + """\
{%- set ns = namespace(query=messages | length - 1, searching=true) -%}
{%- for message in messages[::-1] -%}
{%- if ns.searching and message.role == 'user' and not (
    message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) -%}
{%- set ns.searching = false -%}{%- set ns.query = messages | length - 1 - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}
{%- set content, reasoning = message.content or '', '' -%}
{%- if message.reasoning_content is string -%}
{%- set reasoning = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.query and (loop.last or reasoning) -%}
{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ content }}"""
    + _QWEN_CALLS
    + "{%- elif message.role == 'tool' -%}"
    + _QWEN_RESULT
    + """\
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}"""
)

LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro -%}
{%- set system, rest = '', messages -%}
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content | trim, messages[1:] %}{% endif -%}
{{- head('system') + ('Environment: ipython\\n' if tools else '') -}}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + (date_string or '26 Jul 2024') -}}
{{- '\\n\\n' + system + '<|eot_id|>' -}}
{%- set ns = namespace(first=tools is defined and tools is not none) -%}
{%- if ns.first and (rest | length == 0 or rest[0].role != 'user') -%}
{{ raise_exception('the tools are shown in the first user message, and there is none') }}
{%- endif -%}
{%- for message in rest -%}
{%- if ns.first -%}
{%- set ns.first = false -%}
{{- head('user') + 'Answer with {"name": function name, "parameters": arguments}.\\n\\n' -}}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor -%}
{{- (message.content | trim) + '<|eot_id|>' -}}
{%- elif message.tool_calls -%}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif -%}
{%- set call = message.tool_calls[0].function -%}
{{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' -}}
{%- elif message.role == 'tool' or message.role == 'ipython' -%}
{{- head('ipython') -}}
{%- if message.content is mapping or message.content is iterable -%}
{{- message.content | tojson -}}
{%- else -%}
{{- message.content -}}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- else -%}
{{- head(message.role) + (message.content | trim) + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif -%}"""

MISTRAL = """\
{{- '<s>' -}}
{%- set ns = namespace(index=0, user=none) -%}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{%- for message in rest if message.role == 'user' %}{% set ns.user = message %}{% endfor -%}
{%- for message in rest -%}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
{%- if (message.role == 'user') != (ns.index % 2 == 0) -%}
{{ raise_exception('roles must alternate user/assistant/user/assistant') }}
{%- endif -%}
{%- set ns.index = ns.index + 1 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in rest -%}
{%- if message.role == 'user' -%}
{%- if tools and message is sameas(ns.user) -%}
{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif -%}
{%- if loop.last and messages[0].role == 'system' -%}
{{ '[INST] ' + messages[0].content + '\\n\\n' + message.content + '[/INST]' }}
{%- else -%}
{{ '[INST] ' + message.content + '[/INST]' }}
{%- endif -%}
{%- elif message.tool_calls -%}
{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls -%}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids must have 9 characters') }}{% endif -%}
{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor -%}
{{ ']</s>' }}
{%- elif message.role == 'assistant' -%}
{{ ' ' + (message.content | trim) + '</s>' }}
{%- elif message.role == 'tool' -%}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 -%}
{{ raise_exception('ids must have 9 characters') }}
{%- endif -%}
{{ '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- else -%}
{{ raise_exception('unknown role') }}
{%- endif -%}
{%- endfor -%}"""

GEMMA = """\
{{- '<bos>' -}}
{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant') }}
{%- endif -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + (message.content | trim) + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}"""

GEMMA2 = """\
{{- '<bos>' -}}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
""" + GEMMA.removeprefix("{{- '<bos>' -}}\n")

GLM = """\
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
{{ '<|system|>\\n# Tools' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{%- endif -%}
{%- set ns = namespace(query=-1) -%}
{%- for message in messages if message.role == 'user' %}{% set ns.query = messages.index(message) %}{% endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{ '<|user|>\\n' + message.content + ('' if enable_thinking is not defined or enable_thinking else '/nothink') }}
{%- elif message.role == 'assistant' -%}
{%- set content = (message.content or '').split('</think>')[-1] -%}
{{ '<|assistant|>\\n<think></think>' + ('\\n' + content.strip() if content.strip() else '') }}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{ '\\n<tool_call>' + call.name }}
{%- for key, value in call.arguments.items() -%}
{{ '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' + (value if value is string else value | tojson) }}
{{- '</arg_value>' }}
{%- endfor -%}
{{ '\\n</tool_call>' }}
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|assistant|>' + ('' if enable_thinking is not defined or enable_thinking else '\\n<think></think>') }}
{%- endif -%}"""


@dataclass(frozen=True)
class ModelChat:
    """A template with its special tokens."""

    template: str
    ends: tuple[str, ...]
    """What ends a message: of an answer, and of a message with calls."""
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    """Single tokens that are not special."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template."""


_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

CHATS = {
    "chatml": ModelChat(CHATML, ("<|im_end|>",), _CHATML_TOKENS),
    "qwen2.5": ModelChat(QWEN2, ("<|im_end|>",), _CHATML_TOKENS, _TOOL_TOKENS),
    "qwen3": ModelChat(QWEN3, ("<|im_end|>",), _CHATML_TOKENS, _TOOL_TOKENS),
    "qwen3-nothink": ModelChat(QWEN3, ("<|im_end|>",), _CHATML_TOKENS, _TOOL_TOKENS, {"enable_thinking": False}),
    "llama3": ModelChat(
        LLAMA3,
        ("<|eot_id|>", "<|eom_id|>"),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    ),
    "mistral": ModelChat(
        MISTRAL,
        ("</s>",),
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]",
         "[/AVAILABLE_TOOLS]"),
    ),
    "gemma": ModelChat(GEMMA, ("<end_of_turn>",), ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "gemma2": ModelChat(GEMMA2, ("<end_of_turn>",), ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "glm": ModelChat(
        GLM,
        ("<|user|>", "<|observation|>"),
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        (*_TOOL_TOKENS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
}  # fmt: skip


@lru_cache(maxsize=16)
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose special tokens are those of the model."""
    chat = CHATS[name]
    made = load_tokenizer("tiny:qwen3")
    made.add_tokens([AddedToken(each, special=True, normalized=False) for each in chat.special], special_tokens=True)
    made.add_tokens([AddedToken(each, special=False, normalized=False) for each in chat.added])
    made.eos_token = chat.ends[0]
    made.chat_template = chat.template
    return made
