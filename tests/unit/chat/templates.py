"""Chat templates with the rules of well-known models, and small tokenizers for them.

Each has what makes the tokens between two turns hard to find: Qwen 3 strips earlier reasoning, Llama 3 and Mistral hide
the content of a message with calls, Mistral and Gemma refuse two messages of one role, Gemma knows no tools, and GLM
has no end token.
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
{%- if ns.searching and message.role == 'user' -%}
{%- set ns.searching = false -%}{%- set ns.query = messages | length - 1 - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}
{%- set content, reasoning = message.content or '', '' -%}
{%- if '</think>' in content -%}
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
{%- if tools -%}
{{- head('system') + 'Environment: ipython' -}}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{- '\\nAnswer with {"name": function name, "parameters": arguments}.<|eot_id|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif -%}
{%- set call = message.tool_calls[0].function -%}
{{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' -}}
{%- elif message.role == 'tool' -%}
{{- head('ipython') + (message.content | tojson) + '<|eot_id|>' -}}
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
{{ '[INST] ' + message.content + '[/INST]' }}
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
