"""Parsers of tool calls, one file per format: they find the calls in a model's message.

    parser = make_parser("auto", tokenizer)
    reply = parser.parse(text)                  # ParsedReply(content, calls)

    stream = parser.stream()                    # while the message arrives
    for piece in pieces:
        events = stream.feed(piece)
    events = stream.finish()

Reasoning (``<think>...</think>``) is content, and a call inside it is not a call. A call that cannot be read becomes a
``MalformedCall``; a parser never raises because of what a model wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from headwater.chat.call_grammar import CallShape, call_grammar
from headwater.chat.reader import CallDone, CallEvent, ContentText, Reader, Steps
from headwater.chat.render import special_tokens
from headwater.core.errors import HeadwaterError
from headwater.core.protocols import Tokenizer
from headwater.core.registry import Registry, blaming
from headwater.core.requests import Grammar
from headwater.core.tool_calls import ParsedReply

PARSERS = Registry("tool-call parser", "headwater.chat.parsers")

Schemas = Sequence[Mapping[str, Any]]
"""OpenAI function schemas: ``{"type": "function", "function": {"name": ..., "parameters": {...}}}``."""


class ToolCallParser(Protocol):
    """Reads one format. ``text`` is a complete message of the model with its special tokens (``Episode.raw_text``).

    ``schemas`` are those of the tools; formats without types for arguments need them. ``salt`` makes the identifiers of
    calls differ between messages. ``in_reasoning`` says that the prompt has begun reasoning, so the message begins
    inside it.
    """

    def parse(self, text: str, schemas: Schemas = (), *, salt: str = "", in_reasoning: bool = False) -> ParsedReply: ...

    def stream(self, schemas: Schemas = (), *, salt: str = "", in_reasoning: bool = False) -> CallStream: ...


class CallStream:
    """Finds calls while a message arrives. How the text is split makes no difference."""

    def __init__(self, reader: Reader, steps: Steps[None]) -> None:
        self._reader = reader
        self._steps: Steps[None] | None = steps

    def feed(self, text: str) -> list[CallEvent]:
        """What became certain with ``text``."""
        self._reader.add(text)
        self._advance()
        return self._reader.take_events()

    def finish(self) -> list[CallEvent]:
        """The rest, at the end of the message."""
        self._reader.complete()
        self._advance()
        self._reader.finish_content()
        return self._reader.take_events()

    def _advance(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None


class CallFormat:
    """Base of the parsers: a format only says how it is read."""

    template_marks: ClassVar[tuple[str, ...]] = ()
    """Strings that the chat templates of models with this format contain."""

    def __init__(self, hidden: Sequence[str] = ()) -> None:
        """``hidden`` are special tokens, which are left out of the content."""
        self._hidden = tuple(hidden)

    def parse(self, text: str, schemas: Schemas = (), *, salt: str = "", in_reasoning: bool = False) -> ParsedReply:
        stream = self.stream(schemas, salt=salt, in_reasoning=in_reasoning)
        events = [*stream.feed(text), *stream.finish()]
        content = "".join(event.text for event in events if isinstance(event, ContentText))
        return ParsedReply(content, tuple(event.call for event in events if isinstance(event, CallDone)))

    def stream(self, schemas: Schemas = (), *, salt: str = "", in_reasoning: bool = False) -> CallStream:
        reader = Reader(schemas, self._hidden, salt, in_reasoning=in_reasoning)
        return CallStream(reader, self.read(reader))

    def shape(self, template: str) -> CallShape | None:
        """How a model with this chat template writes calls. None if that is unknown, so calls cannot be required."""
        return None

    def grammar(
        self,
        schemas: Schemas,
        tokenizer: Tokenizer,
        *,
        is_parallel: bool = True,
        in_reasoning: bool = False,
        answer: str | None = None,
    ) -> Grammar | None:
        """A grammar of messages that call these tools. None if the format has none.

        With ``answer``, a JSON schema, the message may also be such a JSON text.
        """
        shape = self.shape(template_of(tokenizer))
        if shape is None:
            return None
        return call_grammar(
            shape, schemas, tokenizer, is_parallel=is_parallel, in_reasoning=in_reasoning, answer=answer
        )

    def read(self, reader: Reader) -> Steps[None]:
        """Read the whole message. Ends when ``reader.content_until`` returns an empty string."""
        raise NotImplementedError


def make_parser(name: str, tokenizer: Tokenizer, setting: str = "tools.parser") -> ToolCallParser:
    """The parser ``name``: a format, ``auto``, or a class as ``file.py:Class``."""
    with blaming(f"{setting} = {name}"):
        made: ToolCallParser = PARSERS.resolve(choose_parser(tokenizer) if name == "auto" else name)(
            hidden=tuple(special_tokens(tokenizer))
        )
    return made


def template_of(tokenizer: Tokenizer) -> str:
    """The chat template; all of them, if there are several."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)


def choose_parser(tokenizer: Tokenizer) -> str:
    """The format that the chat template of ``tokenizer`` describes."""
    template = template_of(tokenizer)
    formats = {name: PARSERS.resolve(name).template_marks for name in PARSERS.names()}
    fitting = [name for name, marks in formats.items() if marks and all(mark in template for mark in marks)]
    if not fitting:
        raise HeadwaterError(
            "the chat template does not show how this model writes tool calls; choose one of "
            f"{', '.join(PARSERS.names())}"
        )
    # A template with more marks is more specific: several formats begin a call with <tool_call>.
    return max(fitting, key=lambda name: len(formats[name]))
