"""Final answers in the text of a response: where they are, and whether two of them are the same text or number.

Everything here is linear in the length of the text, so that it is safe to run on whatever a model wrote.
"""

from __future__ import annotations

import re
from fractions import Fraction

_BOXES = ("\\boxed", "\\fbox")
_BETWEEN_BOXES = re.compile(r"[\s$,;.]*(?:and|or|\\text\{\s*(?:and|or)\s*\})?[\s$,;]*")
_MOST_BETWEEN_BOXES, _MOST_BOXES = 40, 20
_BARE_BOX = re.compile(r"[ \t]{1,3}([^\s${}]+)")
_ANSWER_COLON = re.compile(r"answer[ \t]{0,3}\*{0,2}[ \t]{0,3}:([^\n]+)", re.IGNORECASE)
_ANSWER_LINE = re.compile(r"answer[ \t]{0,3}\*{0,2}[ \t]{0,3}(?::|is\b:?)([^\n]+)", re.IGNORECASE)
_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|[\s$~]")
_FRACTION_NAME = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_WHOLE = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)")
_THIN_SEPARATOR = re.compile(r"(?<=\d)(?:\\[,;! ]|\{,\}|,\\!)(?=\d{3}(?!\d))")
_MIXED = re.compile(r"(?<![\d./^_{])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_SET_BUILDER = re.compile(
    r"\\\{\s*([a-zA-Z])\s*(?:\\in\s*(?:\\mathbb\s*\{?\s*R\s*\}?|\\R|ℝ)\s*)?"
    r"(?:\\mid(?![a-zA-Z])|\\vert(?![a-zA-Z])|\\colon(?![a-zA-Z])|\||:)\s*([^{}|:]*)\\\}"
)
_SIZED = re.compile(r"\\(?:left|right)(?![a-zA-Z])")
_RELATION = re.compile(r"[<>≤≥]|\\(?:le|ge|leq|geq|lt|gt|leqslant|geqslant)(?![a-zA-Z])")
_OPENINGS, _CLOSINGS = ("(", "["), (")", "]")


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``; boxes that directly follow each other are joined by commas.

    None if there is no box, or if the last one is not closed.
    """
    first = max(text.rfind(name) for name in _BOXES)
    box = _box_span(text, first) if first >= 0 else None
    if box is None:
        return None
    contents = [text[box[0] : box[1]].strip()]
    for _ in range(_MOST_BOXES):
        previous = max(text.rfind(name, 0, first) for name in _BOXES)
        box = _box_span(text, previous) if previous >= 0 else None
        if box is None or not 0 < first - box[1] <= _MOST_BETWEEN_BOXES:
            break
        if not _BETWEEN_BOXES.fullmatch(text, box[1] + 1, first):
            break
        contents.append(text[box[0] : box[1]].strip())
        first = previous
    # A box that is repeated word for word is one answer.
    return ", ".join(dict.fromkeys(reversed(contents)))


def last_answer_line(text: str, *, needs_colon: bool = True) -> str | None:
    """What the last ``Answer: ...`` says, up to the end of its line; also ``answer is ...`` without ``needs_colon``."""
    found = (_ANSWER_COLON if needs_colon else _ANSWER_LINE).findall(text)
    return _bare(found[-1]) if found else None


def last_answer_tag(text: str) -> str | None:
    """The content of the last ``<answer>...</answer>``."""
    before, closing, _ = text.rpartition("</answer>")
    _, opening, content = before.rpartition("<answer>")
    return content.strip() if closing and opening else None


def last_of_either(text: str) -> str | None:
    r"""The last answer in a box or in an ``Answer:`` line, whichever comes later; a box in the line counts."""
    line_at = max((match.start() for match in _ANSWER_COLON.finditer(text)), default=-1)
    box_at = max(text.rfind(name) for name in _BOXES)
    if box_at > line_at:
        return last_boxed(text[line_at + 1 :])
    return last_answer_line(text)


def tidy(answer: str) -> str:
    """An answer in the form that the verifier reads: without marks around it and with the usual LaTeX signs."""
    answer = _bare(answer).replace("°", "^\\circ").replace("−", "-").replace("×", "\\times ")
    answer = _THIN_SEPARATOR.sub("", answer)
    built = _SET_BUILDER.fullmatch(_SIZED.sub("", answer))
    if built and _RELATION.search(built[2]):  # the numbers for which an inequality holds: the inequality itself
        answer = built[2].strip()
    return _MIXED.sub(r"\1\\frac{\2}{\3}", answer)


def same_text(first: str, second: str) -> bool:
    """Whether two answers are written the same way, apart from spacing."""
    return _plain(first) == _plain(second) != ""


def differ_in_kind(first: str, second: str) -> bool:
    r"""Whether one answer is a set of several elements, ``\{1, 2\}``, and the other a tuple or interval, ``(1, 2)``."""
    kinds = {_kind(_plain(first)), _kind(_plain(second))}
    return kinds == {"set", "ordered"}


def _kind(text: str) -> str:
    if text.startswith("\\{") and text.endswith("\\}") and "," in text and "\\{" not in text[2:]:
        return "set"
    inner = text[1:-1]
    is_one = text.startswith(_OPENINGS) and text.endswith(_CLOSINGS) and not any(each in inner for each in "()[]")
    return "ordered" if is_one and "," in inner else ""


def whole_number(answer: str) -> Fraction | None:
    """The value of an answer that is nothing but a whole number, with or without thousands separators."""
    text = _plain(answer)
    return Fraction(text.replace(",", "")) if len(text) < 1000 and _WHOLE.fullmatch(text) else None


def _plain(text: str) -> str:
    return _FRACTION_NAME.sub(r"\\frac", _SPACING.sub("", tidy(text)))


def _bare(text: str) -> str:
    """Without spaces, emphasis, dollar signs and a full stop around it."""
    before = None
    while text != before:
        before = text
        text = text.strip().strip("*").removesuffix(".")
        for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
                text = text[len(left) : -len(right)]
    return text


def _box_span(text: str, start: int) -> tuple[int, int] | None:
    """Where the content of the box at ``start`` begins and ends; None if its braces are not balanced."""
    after = start + (len(_BOXES[0]) if text.startswith(_BOXES[0], start) else len(_BOXES[1]))
    if bare := _BARE_BOX.match(text, after):
        return bare.span(1)
    opening = text.find("{", after, after + 4)
    if opening < 0 or text[after:opening].strip():
        return None
    depth = 0
    for place in range(opening, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return opening + 1, place
    return None
