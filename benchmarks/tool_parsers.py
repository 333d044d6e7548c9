"""How long the parsers of tool calls take, for a complete message and for each token of a stream.

    python benchmarks/tool_parsers.py

A message has about 5,000 characters of text and a call with 3,000 characters of arguments. A token has 4 characters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from options import parser_of
from record import write_record

from headwater.chat.parsers import PARSERS

TEXT = "the quick brown fox [1] {2} <b> jumps over " * 120
CODE = "print('hello')\n" * 200
OBJECT = json.dumps({"name": "run", "arguments": {"code": CODE}})
ARGUMENTS = json.dumps({"code": CODE})
HIDDEN = tuple(f"<|reserved_{number}|>" for number in range(256))
"""As many special tokens as Llama 3 has."""
MESSAGES = {
    "deepseek": f"{TEXT}<｜tool▁call▁begin｜>run<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
    "glm": f"{TEXT}<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>{CODE}</arg_value>\n</tool_call>",
    "hermes": f"{TEXT}<tool_call>\n{OBJECT}\n</tool_call>",
    "kimi": f"{TEXT}<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
    "llama3_json": f"{TEXT}<|python_tag|>{OBJECT}",
    "llama3_pythonic": f"[run(code={CODE!r})]",
    "mistral": f"{TEXT}[TOOL_CALLS][{OBJECT}]",
    "openai_json": OBJECT,
    "qwen3_coder": f"{TEXT}<function=run>\n<parameter=code>\n{CODE}\n</parameter>\n</function>",
}
NUM_RUNS = 20


def seconds(work: Callable[[], object]) -> float:
    """The shortest processor time of several runs."""
    times = []
    for _ in range(NUM_RUNS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    results = {}
    for name in PARSERS.names():
        parser, message = PARSERS.resolve(name)(HIDDEN), MESSAGES[name]
        (call,) = parser.parse(message).calls
        assert call.name == "run"
        pieces = [message[start : start + 4] for start in range(0, len(message), 4)]

        def stream(parser=parser, pieces=pieces) -> None:  # type: ignore[no-untyped-def]
            reader = parser.stream()
            for piece in pieces:
                reader.feed(piece)
            reader.finish()

        results[name] = {
            "characters": len(message),
            "parse_ms": 1e3 * seconds(lambda parser=parser, message=message: parser.parse(message)),
            "stream_us_per_token": 1e6 * seconds(stream) / len(pieces),
        }
        print(f"{name:16} {results[name]['parse_ms']:.2f} ms, {results[name]['stream_us_per_token']:.1f} us per token")
    write_record(arguments.out, torch.device("cpu"), formats=results)


if __name__ == "__main__":
    main()
