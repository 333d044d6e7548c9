"""Tokens with one placeholder per image, as other programs exchange them, and those that the model reads.

short = collapse(tokens, media, processor)                  # [.., 7, image_pad, 9, ..]
tokens, media = expand(short, contents, processor)          # [.., 7, image_pad, image_pad, image_pad, 9, ..]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headwater.core.media import Media, MediaContent, MediaKind, PlacedMedia
from headwater.models.vision.processor import VisionProcessor

_KINDS: tuple[MediaKind, ...] = ("image", "video")


def placeholder_ids(processor: VisionProcessor) -> dict[int, MediaKind]:
    """The tokens that a chat template writes for an image and for a video, as far as the model takes them."""
    marks = {kind: processor.family.placeholder(kind) for kind in _KINDS}
    return {processor.tokenizer.convert_tokens_to_ids(mark): kind for kind, mark in marks.items() if mark}


def collapse(tokens: Sequence[int], media: Media, processor: VisionProcessor) -> list[int]:
    """``tokens`` with one placeholder in place of all tokens of an item, including those between its blocks.

    Raises ``ValueError`` if that would be read as something else: a placeholder token that a model has sampled before
    an image looks like an image.
    """
    ids = {kind: token for token, kind in placeholder_ids(processor).items()}
    short: list[int] = []
    end, marked = 0, set()
    for item in media:
        whole, placed = _expansion(item.content, processor)
        start = item.blocks[0].start - placed.blocks[0].start
        if start < end or tuple(tokens[start : start + len(whole)]) != whole or placed.moved(start) != item:
            raise ValueError(
                f"the tokens of the {item.content.kind} at {item.blocks[0].start} are not those that the model's "
                "processor makes of it"
            )
        short += tokens[end:start]
        marked.add(len(short))
        short.append(ids[item.content.kind])
        end = start + len(whole)
    if media and any(token in ids.values() and place not in marked for place, token in enumerate(short)):
        raise ValueError("a placeholder token that stands for no image precedes an image, which would take its place")
    return [*short, *tokens[end:]]


def expand(
    tokens: Sequence[int], contents: Sequence[MediaContent], processor: VisionProcessor
) -> tuple[tuple[int, ...], Media]:
    """The inverse of ``collapse``. Several placeholders in a row count as one, as SGLang counts them.

    Raises ``ValueError`` if the number of placeholders differs from that of the contents.
    """
    kinds = placeholder_ids(processor)
    left = {kind: [each for each in contents if each.kind == kind] for kind in _KINDS}
    long: list[int] = []
    media: list[PlacedMedia] = []
    num_found = dict.fromkeys(_KINDS, 0)
    for token, is_first in _runs(tokens, kinds):
        if token not in kinds:
            long.append(token)
            continue
        if not is_first:
            continue
        kind = kinds[token]
        num_found[kind] += 1
        if left[kind]:
            whole, placed = _expansion(left[kind].pop(0), processor)
            media.append(placed.moved(len(long)))
            long += whole
    for kind in _KINDS:
        num_given = sum(each.kind == kind for each in contents)
        if num_found[kind] != num_given:
            raise ValueError(f"the tokens have {num_found[kind]} placeholders for {num_given} {kind}s")
    return tuple(long), tuple(media)


def _expansion(content: MediaContent, processor: VisionProcessor) -> tuple[tuple[int, ...], PlacedMedia]:
    """All tokens that replace the placeholder of a content, and the blocks among them."""
    tokens, (placed,) = processor.encode(processor.family.placeholder(content.kind), [content])
    return tokens, placed


def _runs(tokens: Sequence[int], marks: dict[int, MediaKind]) -> Iterator[tuple[int, bool]]:
    """Every token, and whether it is the first of equal placeholders."""
    before = -1
    for token in tokens:
        yield token, token not in marks or token != before
        before = token
