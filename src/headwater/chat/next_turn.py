"""The tokens between two turns of the model: the end of its message, the messages that follow, its next opening.

The model's own messages are never rendered or tokenised again. Rendering a whole conversation for every turn would
change them: tokens sampled as ``"1", "2"`` can come back as ``"12"``, and templates may strip spaces or reasoning. The
learner would then train on tokens that were never sampled. A placeholder replaces the model's text, and only
the text that the template writes after the placeholder is tokenised and appended.

Templates differ in what they accept after a message with tool calls. ``next_turn`` therefore tries several forms of the
chat, from the most to the least complete, and takes the first whose text can be told apart:

1. the calls beside the placeholder; the template's text for the calls is left out, because the model has written them;
2. the calls without content, for templates that show either calls or content;
3. the placeholder without calls, for templates that do not mark the end of a message, or refuse several calls;
4. the messages as one user message, for templates that do not know the role ``tool`` or refuse two messages of a role;
5. the same four without the earlier conversation, for templates that refuse it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

from headwater.chat.render import ChatError, encode_rendered, is_model_turn, render_chat, special_tokens
from headwater.core.errors import RolloutFailed
from headwater.core.media import Media, MediaContent, MediaProcessor
from headwater.core.protocols import Tokenizer

Message = Mapping[str, Any]
_LAST = "[what-the-model-said-last]"
_CALLED = "[what-it-called]"
_TOLD = "[what-it-was-told]"
_SHORT_HISTORY: Sequence[Message] = ({"role": "user", "content": "?"},)
"""Instead of a history that the template refuses. What follows the model's message does not depend on it."""


@dataclass(frozen=True)
class NextTurn:
    """What follows a reply."""

    tokens: tuple[int, ...]
    """From the end of the reply up to the start of the model's next message."""
    chat: list[Message]
    """The chat in the form that the template accepted. Later turns are rendered with it."""
    media: Media = ()
    """Images and videos, with their places among ``tokens``."""


def next_turn(
    tokenizer: Tokenizer,
    chat: Sequence[Message],
    response_tokens: Sequence[int],
    template_args: Mapping[str, Any] | None = None,
    *,
    has_ended: bool = False,
    processor: MediaProcessor | None = None,
    contents: Sequence[MediaContent] = (),
) -> NextTurn:
    """The tokens that follow the last ``MODEL_TURN`` of ``chat``, up to the start of the model's next message.

    The template closes the model's message with an end token. If ``response_tokens`` (the model's output) already end
    with it, the end token is not repeated. If the model was cut off before its end token, the template's end token is
    included; it was not sampled and is not trained. ``has_ended`` says that the model's last token is an end token of
    its own, which may differ from the template's. ``contents`` are the images and videos after the last model turn, in
    the order of their parts; they need the model's ``processor``, whose template then renders the chat.
    """
    turns = [index for index, message in enumerate(chat) if is_model_turn(message)]
    if not turns:
        raise RolloutFailed("the chat has no answer of the model, so nothing can follow it")
    last = turns[-1]
    owner = tokenizer if processor is None else processor.template
    whole = _Chat(tokenizer, owner, chat[:last], chat[last], chat[last + 1 :], template_args or {})
    problems = []
    for attempt in (*whole.attempts(), *replace(whole, history=_SHORT_HISTORY).attempts()):
        try:
            text, turn, told = attempt()
            tokens, media = _encode(tokenizer, processor, text, contents)
        except RolloutFailed as error:
            problems.append(error)
            continue
        kept = whole.without_end(tokens, response_tokens, has_ended=has_ended)
        num_removed = len(tokens) - len(kept)
        return NextTurn(kept, [*chat[:last], turn, *told], tuple(item.moved(-num_removed) for item in media))
    raise problems[0]


def _encode(
    tokenizer: Tokenizer, processor: MediaProcessor | None, text: str, contents: Sequence[MediaContent]
) -> tuple[tuple[int, ...], Media]:
    if processor is None or not contents:
        # What looks like the placeholder of an image is then ordinary text.
        return encode_rendered(tokenizer, text), ()
    try:
        return processor.encode(text, contents)
    except ValueError as error:
        raise RolloutFailed(
            f"the chat template does not show every image and video of the messages ({error}); use a template that "
            "does, or give them to the model in a message of the user"
        ) from error


_After = tuple[str, Message, Sequence[Message]]
"""The text after the model's message, its message, and the messages that follow, in the form that was accepted."""


@dataclass(frozen=True)
class _Chat:
    """A chat that ends with a message of the model and the messages that follow it."""

    tokenizer: Tokenizer
    owner: Any
    """The tokenizer or processor whose chat template renders."""
    history: Sequence[Message]
    turn: Message
    told: Sequence[Message]
    template_args: Mapping[str, Any]

    def attempts(self) -> list[Callable[[], _After]]:
        has_tools = any(message.get("role") == "tool" for message in self.told)
        merging = [self._as_user_message] if has_tools or len(self.told) > 1 else []
        if not self.turn.get("tool_calls"):
            return [self._plain, *merging]
        return [partial(self._calling, _LAST), partial(self._calling, None), self._plain, *merging]

    def _calling(self, content: str | None) -> _After:
        """With the calls, beside the placeholder or without content."""
        calls = self.turn["tool_calls"]
        turn = {**self.turn, "content": content, "tool_calls": _neutral(calls, {"text": _CALLED})}
        closing = self._closing()

        def after_calls(text: str) -> str:
            if _CALLED not in text:
                raise RolloutFailed("the chat template does not show tool calls; call tell() without tool_calls")
            return _from_closing(text.rpartition(_CALLED)[2], closing)

        text = self._after(turn, self.told, after_calls)
        return text, {**self.turn, "tool_calls": _neutral(calls, {})}, self.told

    def _plain(self) -> _After:
        return self._after(self._plain_turn, self.told), self._turn_for_later(), self.told

    def _as_user_message(self) -> _After:
        told = [{"role": "user", "content": _joined([message.get("content") for message in self.told])}]
        return self._after(self._plain_turn, told), _without_calls(self.turn), told

    def _turn_for_later(self) -> Message:
        """The model's message with its calls, if the template accepts them: some count messages with calls apart."""
        if not self.turn.get("tool_calls"):
            return self.turn
        turn = {**self.turn, "tool_calls": _neutral(self.turn["tool_calls"], {})}
        try:
            self._render([*self.history, turn, *self.told])
        except RolloutFailed:
            return _without_calls(turn)
        return turn

    @property
    def _plain_turn(self) -> Message:
        return {"role": "assistant", "content": _LAST}

    def _after(self, turn: Message, told: Sequence[Message], cut: Callable[[str], str] = str) -> str:
        """What the template writes after ``turn``. ``cut`` removes the calls from what follows the placeholder."""
        text = self._text(turn, told, cut)
        for place, message in enumerate(told):
            if _shows(text, message.get("content")):
                continue
            marked = [{**each, "content": _TOLD} if number == place else each for number, each in enumerate(told)]
            if _TOLD not in self._text(turn, marked, cut):
                raise RolloutFailed(
                    f"the chat template leaves out a message of the role {message.get('role')!r}; use a template that "
                    "shows it, or another role"
                )
        return text

    def _text(self, turn: Message, told: Sequence[Message], cut: Callable[[str], str]) -> str:
        text = self._render([*self.history, turn, *told])
        if turn["content"] is None:
            return cut(text)
        if (count := text.count(_LAST)) != 1:
            raise RolloutFailed(
                f"the chat template shows the model's answer {count} times, so the tokens of the next turn are "
                "unknown; use a template that shows every answer exactly once"
            )
        return cut(text.partition(_LAST)[2])

    def _closing(self) -> str:
        """What the template writes after every message of the model, for example ``<|im_end|>`` and a line break."""
        followed = self._render([*self.history, self._plain_turn, {"role": "user", "content": "?"}])
        last = self._render([*self.history, self._plain_turn], add_generation_prompt=False)
        ends = zip(followed.rpartition(_LAST)[2], last.rpartition(_LAST)[2], strict=False)
        return "".join(mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], ends))

    def _render(self, chat: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        try:
            return render_chat(self.owner, chat, self.template_args, add_generation_prompt=add_generation_prompt)
        except ChatError as error:
            remedy = "" if error.has_template else "; set model.chat_template"
            raise RolloutFailed(f"the messages of the next turn cannot be rendered ({error}){remedy}") from error

    def without_end(
        self, tokens: tuple[int, ...], response_tokens: Sequence[int], *, has_ended: bool
    ) -> tuple[int, ...]:
        """``tokens`` without the end of the model's message, if the model has written it."""
        if not response_tokens or not tokens:
            return tokens
        if response_tokens[-1] in tokens:
            end = tokens.index(response_tokens[-1])
            # Some templates write a space before the end token. The model does not have to.
            if not self.tokenizer.decode(tokens[:end]).strip():
                return tokens[end + 1 :]
        # For example <|eom_id|>, with which Llama ends a call, while the template writes <|eot_id|>.
        has_own_end = has_ended and {response_tokens[-1], tokens[0]} <= set(special_tokens(self.tokenizer).values())
        if has_own_end and encode_rendered(self.tokenizer, self._closing())[:1] == tokens[:1]:
            return tokens[1:]
        return tokens


def _without_calls(turn: Message) -> Message:
    return {key: value for key, value in turn.items() if key != "tool_calls"}


def _neutral(calls: Sequence[Mapping[str, Any]], arguments: Any) -> list[dict[str, Any]]:
    """The calls with other arguments. What the model wrote there could contain the marks of the template."""
    neutral = []
    for call in calls:
        function = call.get("function", call)
        name = re.sub(r"[^\w.-]", "_", str(function.get("name")))
        neutral.append({**call, "type": "function", "function": {"name": name, "arguments": arguments}})
    return neutral


def _from_closing(text: str, closing: str) -> str:
    """``text`` from ``closing`` on. Before it, the template has written the tool calls."""
    start = text.find(closing) if closing.strip() else -1
    if start < 0:
        raise RolloutFailed(
            "the chat template does not mark the end of a message with tool calls, so the tokens of the next turn are "
            "unknown; call tell() without tool_calls"
        )
    return text[start:]


def _shows(text: str, content: Any) -> bool:
    """Whether ``text`` contains ``content`` in one of the usual forms."""
    told = _text_of(content).strip()
    return told in text or any(json.dumps(told, ensure_ascii=ascii)[1:-1] in text for ascii in (True, False))


def _joined(contents: Sequence[Any]) -> Any:
    """The contents of several messages as one: as text, or as parts if there are images or videos among them."""
    if all(_text_parts(content) for content in contents):
        return "\n".join(_text_of(content) for content in contents)
    parts: list[Any] = []
    for content in contents:
        separator = [{"type": "text", "text": "\n"}] if parts else []
        is_list = isinstance(content, (list, tuple))
        parts += [*separator, *(content if is_list else [{"type": "text", "text": _text_of(content)}])]
    return parts


def _text_parts(content: Any) -> bool:
    return not isinstance(content, (list, tuple)) or all(part.get("type", "text") == "text" for part in content)


def _text_of(content: Any) -> str:
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
