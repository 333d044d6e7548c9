"""What an agent and the model said, by token: a tree of replies. Every leaf becomes a trajectory.

    draft = transcript.open(messages, {"tools": tools})    # continues a reply, branches off one, or starts anew
    await draft.piece.reply()
    draft.commit("chatcmpl-1", message)                    # as the client receives it

A call that repeats the conversation up to the newest reply of a piece and adds messages continues that piece: the added
messages are appended with ``Episode.tell``, and the model's tokens are never tokenised again. A call that repeats it up
to an earlier reply, or up to a reply that another call is continuing, becomes a branch with the same tokens up to
there. Any other call starts a piece with the messages as they are.

The first call on a reply draws from the same random keys as a workflow that calls ``reply`` and ``tell``. The keys of
branches depend on the conversation and not on the order of calls, so agents that call concurrently get the same tokens
in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.core.errors import RolloutFailed
from headwater.core.requests import derive_key
from headwater.serving.openai.tools import for_template
from headwater.workflows.agents.conversation import Message, next_key, prefix_keys
from headwater.workflows.episode import Episode


class NoRoom(RolloutFailed):
    """The messages of a call, and one more token, do not fit in the episode."""


@dataclass(eq=False)
class TurnPoint:
    """A place where the model may reply: the beginning of a piece, or the end of a reply."""

    turn: int
    """Replies so far in this piece; 0 at its beginning."""
    episode: Episode | None
    """The piece up to here. None after a call has continued it: ``heir`` then has these tokens too."""
    heir: TurnPoint | None = None
    is_busy: bool = False
    """Whether a call is continuing this node."""
    completion_id: str = ""
    message: Message = field(default_factory=dict)
    """The reply as the client received it."""
    parent: TurnPoint | None = None

    def holder(self) -> TurnPoint:
        """The node that has the tokens up to here, possibly followed by others."""
        node = self
        while node.episode is None:
            assert node.heir is not None
            node = node.heir
        return node

    def path(self) -> Iterator[TurnPoint]:
        """The replies of this piece, the last one first."""
        node: TurnPoint | None = self
        while node is not None and node.turn:
            yield node
            node = node.parent


@dataclass(eq=False)
class Draft:
    """A call that is being answered. Without ``commit`` it leaves no trace."""

    piece: Episode
    _transcript: Transcript
    _node: TurnPoint
    _key: str
    """Of the conversation before the reply."""
    _continues: bool

    def commit(self, completion_id: str, message: Message) -> None:
        """Keep the reply, which the client receives as ``message``."""
        self.close()
        node = TurnPoint(
            turn=self._node.turn + 1,
            episode=self.piece,
            completion_id=completion_id,
            message=message,
            parent=self._node,
        )
        if self._continues:
            self._node.episode, self._node.heir = None, node
        self._transcript.add(node, next_key(self._key, message))

    def close(self) -> None:
        if self._continues:
            self._node.is_busy = False


@dataclass(eq=False)
class Transcript:
    """The pieces of one episode."""

    root: Episode
    _nodes: dict[str, list[TurnPoint]] = field(default_factory=dict)
    """By the key of the conversation up to there."""
    _replies: list[TurnPoint] = field(default_factory=list)
    _labels: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        key = self._start_key(prefix_keys(self.root.messages, {}))
        self._nodes[key] = [TurnPoint(0, self.root)]

    def open(self, messages: Sequence[Message], template_args: Mapping[str, Any]) -> Draft:
        """Prepare an answer to ``messages``, which are not empty. Raises ``NoRoom`` if they do not fit.

        ``template_args`` are arguments of the chat template that the call brings, such as ``tools``.
        """
        keys = prefix_keys(messages, template_args)
        node, num_known = self._find(keys)
        if node is None:
            node, num_known = self._begin(messages, template_args, keys), len(messages)
        continues = node.heir is None and not node.is_busy
        if continues:
            assert node.episode is not None
            piece = node.episode.copy()
        else:
            piece = self._branch(node, keys[-1])
        self._tell(piece, node, messages[num_known:])
        if continues:
            node.is_busy = True
        return Draft(piece, self, node, keys[-1], continues)

    def add(self, node: TurnPoint, key: str) -> None:
        """A reply, with the key of the conversation up to and including it."""
        self._nodes.setdefault(key, []).append(node)
        self._replies.append(node)

    @property
    def num_replies(self) -> int:
        return len(self._replies)

    @property
    def last(self) -> TurnPoint | None:
        """The newest reply."""
        return self._replies[-1] if self._replies else None

    @property
    def replies(self) -> tuple[TurnPoint, ...]:
        """All replies, in the order of their completion."""
        return tuple(self._replies)

    def completion_ids(self) -> set[str]:
        return {node.completion_id for node in self._replies}

    def leaves(self) -> list[TurnPoint]:
        """The last reply of every piece, in an order that does not depend on the order of calls."""
        leaves = [node for node in self._replies if node.episode is not None]
        return sorted(leaves, key=lambda node: node.episode.tokens if node.episode is not None else ())

    def _find(self, keys: Sequence[str]) -> tuple[TurnPoint | None, int]:
        """The node that has most of the conversation, and how many of the messages it has."""
        for count in range(len(keys) - 1, 0, -1):  # at least one message follows a reply
            if nodes := self._nodes.get(keys[count - 1]):
                return min(nodes, key=lambda node: (node.heir is not None, node.is_busy)), count
        if nodes := self._nodes.get(self._start_key(keys)):
            return nodes[0], len(keys)
        return None, 0

    def _begin(self, messages: Sequence[Message], template_args: Mapping[str, Any], keys: Sequence[str]) -> TurnPoint:
        piece = self._keyed(self.root.branch(messages, template_args=template_args, label=self._label(keys[-1])))
        node = TurnPoint(0, piece)
        self._nodes[self._start_key(keys)] = [node]
        return node

    def _branch(self, node: TurnPoint, key: str) -> Episode:
        episode = node.holder().episode
        assert episode is not None
        return self._keyed(episode.branch(turn=node.turn, label=self._label(key)))

    def _label(self, key: str) -> str:
        """A name that no other branch of the episode has."""
        self._labels[key] += 1
        return f"{key[:12]}-{self._labels[key]}"

    def _keyed(self, piece: Episode) -> Episode:
        """The piece with randomness that depends on its label alone, and not on the piece that it comes from."""
        label = piece.name.rpartition(".")[2]
        piece.data = replace(piece.data, rng_key=derive_key(self.root.data.rng_key, "branch", label))
        return piece

    @staticmethod
    def _tell(piece: Episode, node: TurnPoint, messages: Sequence[Message]) -> None:
        content = node.message.get("content") or ""
        if node.turn and not piece.tell(messages, tool_calls=_calls_of(node.message), content=content):
            raise NoRoom(f"the messages after the model's reply do not fit: {_room(piece)}")
        if piece.room < 1:
            raise NoRoom(f"the messages have {len(piece.tokens)} tokens and do not fit: {_room(piece)}")

    @staticmethod
    def _start_key(keys: Sequence[str]) -> str:
        return f"start {keys[-1]}"


def _calls_of(message: Message) -> list[Message]:
    """The tool calls of a reply, for the chat template. What it writes for them is not used, so their arguments may be
    anything, but they must be a mapping."""
    calls: list[Message] = []
    for call in for_template(dict(message), "the reply").get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        made = arguments if isinstance(arguments, Mapping) else {"unreadable": arguments}
        calls.append({**call, "function": {**call["function"], "arguments": made}})
    return calls


def _room(piece: Episode) -> str:
    return (
        f"{max(0, piece.room)} of rollout.max_new_tokens = {piece.context.sampling.max_new_tokens} tokens are left in "
        "this conversation; shorten it, or raise rollout.max_new_tokens (or data.max_prompt_tokens, for the first "
        "messages)"
    )
