"""What the search tools have in common: their schema, and the documents that were found, as text for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SEARCH_SCHEMA = {
    "name": "search",
    "description": "Search for documents about a question or topic.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to search for."}},
        "required": ["query"],
    },
}
_TEXT_KEYS = ("contents", "text", "content", "body", "passage")


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    title: str = ""


def read_document(value: Any) -> Document | None:
    """A document from text or a mapping; None if it is none. Search-R1 begins ``contents`` with the title."""
    if isinstance(value, str):
        return Document(value)
    if not isinstance(value, Mapping):
        return None
    title = value.get("title")
    for key in _TEXT_KEYS:
        text = value.get(key)
        if not isinstance(text, str):
            continue
        if isinstance(title, str) and title:
            return Document(text, title)
        first, newline, rest = text.partition("\n")
        return Document(rest, first.strip().strip('"')) if key == "contents" and newline else Document(text)
    return None


def show_documents(documents: Sequence[Document]) -> str:
    """Numbered documents; says so if there are none."""
    if not documents:
        return "No documents found."
    shown = (
        f"Doc {number}{f' (Title: {each.title})' if each.title else ''}: {each.text.strip()}"
        for number, each in enumerate(documents, 1)
    )
    return "\n".join(shown)


def show_results(queries: Sequence[str], results: Sequence[Sequence[Document]]) -> str:
    """The documents of each query, under the query if there are several."""
    if len(results) == 1:
        return show_documents(results[0])
    shown = (f"Query: {query}\n{show_documents(found)}" for query, found in zip(queries, results, strict=True))
    return "\n\n".join(shown)


def queries_of(parameters: Mapping[str, Any]) -> list[str]:
    """The queries of a call: ``query``, or a list as in verl's search tool."""
    for key in ("query", "query_list", "queries"):
        value = parameters.get(key)
        if isinstance(value, str):
            return [value]
        if isinstance(value, Sequence) and value and all(isinstance(each, str) for each in value):
            return list(value)
    return []
