"""Grammars that the text of a response must match, with the library llguidance.

grammars = Grammars(tokenizer, vocab_size, end_token_ids)
matcher = grammars.start(Grammar("regex", "[0-9]+"))
matcher.allowed()            # a boolean per token of the vocabulary
matcher.take([17])           # the token that was sampled
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.core.errors import RequestError
from headwater.core.requests import Grammar

_MAX_KEPT = 64
"""How many compiled grammars are kept for later requests."""
_WHITESPACE = r"[ \n\r\t]{0,32}"
"""Between two parts of a JSON text. A limit, because a model may otherwise write nothing but spaces."""


class GrammarMatcher:
    """The state of one response. Belongs to one thread."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def error(self) -> str:
        """Why the grammar cannot be applied any more. Empty while it works."""
        return str(self._matcher.get_error())

    def take(self, tokens: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(tokens))

    def allowed(self) -> NDArray[np.bool_]:
        """Per token, whether it continues a text of the grammar. The end token is allowed after a complete text."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)


class Grammars:
    """Compiles grammars for one tokenizer. May be used by any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of a response. Raises ``RequestError`` for a grammar that is not valid."""
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = self._compile(grammar)
                if len(self._compiled) > _MAX_KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return GrammarMatcher(self._compiled[grammar].deep_copy(), self._vocab_size)

    def _compile(self, grammar: Grammar) -> Any:
        llguidance = _library()
        make = llguidance.LLMatcher
        try:
            if grammar.kind == "regex":
                source = make.grammar_from_regex(grammar.text)
            elif grammar.kind == "lark":
                source = make.grammar_from_lark(grammar.text)
            else:
                source = make.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": _WHITESPACE})
        except ValueError as error:
            raise RequestError(f"grammar: {error}") from error
        matcher = make(self._library_tokenizer, source, log_level=0)
        if matcher.is_error():
            raise RequestError(f"grammar: the {grammar.kind} is not supported: {_first_line(matcher.get_error())}")
        return matcher

    @cached_property
    def _library_tokenizer(self) -> Any:
        if not self._end_token_ids:
            raise RequestError("grammar: the model has no end token, so a text could never end; use stop strings")
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError("grammar: needs a fast tokenizer (tokenizer.json); this model has none")
        copy = type(backend).from_str(backend.to_str())
        copy.no_padding()
        copy.no_truncation()
        try:
            return _library().LLTokenizer(copy.to_str(), n_vocab=self._vocab_size, eos_token=self._end_token_ids)
        except ValueError as error:
            raise RequestError(f"grammar: this model's tokenizer is not supported: {error}") from error


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError("grammar: needs the package llguidance; pip install llguidance") from error
    return llguidance


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")[:200]
