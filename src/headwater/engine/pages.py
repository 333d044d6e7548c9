"""Which pages of the KV cache are free, in use, shared, or kept for prompts that start with the same tokens.

This is bookkeeping only: page numbers and reference counts, no tensors. Page 0 is scratch space for rows without work
and is never allocated.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]

SCRATCH_PAGE = 0


class OutOfPages(Exception):
    """Fewer pages are available than were requested. None was allocated."""


class PagePool:
    """Allocates pages, counts references to them, and keeps full pages in the prefix cache.

    pages = pool.allocate(3)
    pool.retain(pages)          # a second sequence reads the same prompt
    pool.register(pages, keys)  # later prompts with the same prefix find them
    pool.release(pages)         # once per allocate, retain or match
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages = {num_pages}: must be >= 2, one of them scratch")
        self.num_total = num_pages - 1
        self._references = np.zeros(num_pages, np.int32)
        self._free = np.arange(num_pages - 1, SCRATCH_PAGE, -1, dtype=np.int32)
        self._num_free = self.num_total
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._is_remembered = np.zeros(num_pages, np.bool_)
        # Registered pages without references, least recently used first. They are reused when free pages run out.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        return self._num_free + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_total - self.num_available

    def allocate(self, count: int) -> Pages:
        """``count`` pages with one reference each. When free pages run out, idle registered pages are reused."""
        if count > self.num_available:
            raise OutOfPages(f"{count} pages requested, {self.num_available} available")
        while self._num_free < count:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self._is_remembered[page] = False
            self._push(np.array([page], np.int32))
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count].copy()
        self._references[pages] = 1
        return pages

    def retain(self, pages: Pages, count: int = 1) -> None:
        """Add ``count`` references to each of ``pages``, which must be in use."""
        self._references[pages] += count

    def release(self, pages: Pages) -> None:
        """Remove one reference from each page. A page without references is free, or idle if it is registered."""
        self._references[pages] -= 1
        unused = pages[self._references[pages] == 0]
        is_remembered = self._is_remembered[unused]
        if is_remembered.any():
            # The end of a prefix is useless without its start, so the last page is reused first.
            self._idle.update(dict.fromkeys(unused[is_remembered][::-1].tolist()))
            unused = unused[~is_remembered]
        self._push(unused)

    def release_all(self, pages: Pages) -> None:
        """``release`` for many sequences in a few operations: one reference per occurrence of a page in ``pages``.

        The order is that of reuse: the last pages of the sequences come first.
        """
        self._references -= np.bincount(pages, minlength=len(self._references)).astype(np.int32)
        _, first = np.unique(pages, return_index=True)
        different = pages[np.sort(first)]
        unused = different[self._references[different] == 0]
        is_remembered = self._is_remembered[unused]
        self._idle.update(dict.fromkeys(unused[is_remembered].tolist()))
        self._push(unused[~is_remembered])

    def drop(self, pages: Pages) -> None:
        """Empty the prefix cache, and remove one reference per occurrence of a page in ``pages``."""
        self.forget()
        num_dropped = np.bincount(pages, minlength=len(self._references)).astype(np.int32)
        self._references -= num_dropped
        self._push(np.flatnonzero((num_dropped > 0) & (self._references == 0)).astype(np.int32))

    def match(self, keys: Iterable[bytes]) -> Pages:
        """The pages of the longest registered prefix, with one reference added to each."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
            self._idle.pop(page, None)
        found = np.array(pages, np.int32)
        self.retain(found)
        return found

    def knows(self, key: bytes) -> bool:
        """Whether a page with this prefix is registered."""
        return key in self._page_of

    def register(self, pages: Pages, keys: Sequence[bytes]) -> None:
        """Register full pages under their prefix keys. An existing page for the same prefix is kept."""
        for page, key in zip(pages.tolist(), keys, strict=True):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key] = page
                self._key_of[page] = key
                self._is_remembered[page] = True

    def forget(self) -> None:
        """Empty the prefix cache, because the weights that computed it have changed."""
        idle = np.fromiter(self._idle, np.int32, len(self._idle))
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()
        self._is_remembered[:] = False
        self._push(idle)

    def _push(self, pages: Pages) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)


def prefix_keys(tokens: NDArray[np.int32], page_tokens: int, salt: int) -> list[bytes]:
    """One key per full page of ``tokens``. It identifies all tokens up to the end of the page and the ``salt``."""
    key = salt.to_bytes(8, "little", signed=True)
    keys = []
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        key = hashlib.blake2b(key + tokens[start : start + page_tokens].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys
