"""Grammars of calls: whatever they allow, the parser of the same format reads as calls that match the schemas."""

from __future__ import annotations

import json
import random

from chat.written_calls import schema
from transformers import AddedToken

from headwater.chat.parsers import PARSERS, make_parser
from headwater.core.requests import Grammar
from headwater.core.tool_calls import ToolCall
from headwater.engine.grammar import Grammars
from headwater.models.load import load_tokenizer

SCHEMAS = [
    schema("search", query={"type": "string", "maxLength": 12}, kind={"type": "string", "enum": ["web", "news"]}),
    schema("add", a={"type": "integer", "minimum": -99, "maximum": 99}, b={"type": "boolean"}),
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS[0]["function"]["parameters"]["required"] = ["kind"]
TYPES = {"query": str, "kind": str, "a": int, "b": bool}
SPECIAL = (
    "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
)  # fmt: skip
PATIENCE = 40
"""After so many tokens, tokens that end something are preferred."""


def tokenizer(*special: str):
    made = load_tokenizer("tiny:qwen3")
    made.add_tokens([AddedToken(each, special=True, normalized=False) for each in special], special_tokens=True)
    return made


def walk(grammars: Grammars, made, grammar: Grammar, rng: random.Random, start: str = "") -> str:
    """A text of random tokens that the grammar allows. It begins with ``start``."""
    matcher, tokens = grammars.start(grammar), made.encode(start, add_special_tokens=False)
    matcher.take(tokens)
    assert not matcher.error
    while True:
        allowed = [int(token) for token in matcher.allowed().nonzero()[0]]
        assert allowed, made.decode(tokens)
        if made.eos_token_id in allowed and (len(allowed) == 1 or rng.random() < 0.5 or len(tokens) > PATIENCE):
            return made.decode(tokens, skip_special_tokens=False)
        if len(tokens) > PATIENCE and (closing := [each for each in allowed if made.decode([each]) in ('"', "<", "}")]):
            allowed = closing
        tokens.append(rng.choice([each for each in allowed if each != made.eos_token_id]))
        matcher.take(tokens[-1:])
        assert len(tokens) < 2000


def check(call) -> None:
    assert isinstance(call, ToolCall), call
    function = next(each["function"] for each in SCHEMAS if each["function"]["name"] == call.name)
    parameters = function.get("parameters") or {"properties": {}, "required": []}
    assert set(parameters["required"]) <= set(call.arguments) <= set(parameters["properties"]), call
    for key, value in call.arguments.items():
        assert type(value) is TYPES[key], call


def test_every_text_of_a_grammar_is_calls():
    made, rng = tokenizer(*SPECIAL), random.Random(0)
    grammars = Grammars(made, len(made), [made.eos_token_id])
    for name in PARSERS.names():
        parser = make_parser(name, made)
        for template in ("", "[ARGS] ```json") if name in ("deepseek", "mistral") else ("",):
            made.chat_template = template
            for is_parallel in (True, True, False):
                text = walk(grammars, made, parser.grammar(SCHEMAS, made, is_parallel=is_parallel), rng)
                reply = parser.parse(text, SCHEMAS)
                assert reply.calls, (name, text)
                assert reply.content == "", (name, text)
                assert is_parallel or len(reply.calls) == 1
                for call in reply.calls:
                    check(call)


def test_an_answer_or_calls_after_reasoning():
    made, rng = tokenizer(), random.Random(0)
    parser, grammars = make_parser("hermes", made), Grammars(made, len(made), [made.eos_token_id])
    answer = json.dumps({"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]})
    grammar = parser.grammar(SCHEMAS, made, answer=answer, in_reasoning=True)
    seen = set()
    for _ in range(12):
        text = walk(grammars, made, grammar, rng, "Hm</think>")
        reply = parser.parse(text, SCHEMAS, in_reasoning=True)
        seen.add(bool(reply.calls))
        assert "</think>" in reply.content
        assert reply.calls or "x" in json.loads(reply.content.partition("</think>")[2])
    assert seen == {True, False}


def test_a_named_function_is_the_only_one():
    made, rng = tokenizer(), random.Random(0)
    parser, grammars = make_parser("auto", made), Grammars(made, len(made), [made.eos_token_id])
    for _ in range(3):
        text = walk(grammars, made, parser.grammar(SCHEMAS[2:], made, is_parallel=False), rng)
        assert [call.name for call in parser.parse(text).calls] == ["now"]
