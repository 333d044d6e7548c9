"""``search``: BM25 search over a local file of documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from headwater.config.constraints import AtLeast
from headwater.core.errors import DataError, HeadwaterError
from headwater.core.registry import similar_path
from headwater.tools import TOOLS
from headwater.tools.base import BaseTool, ToolResponse
from headwater.tools.documents import SEARCH_SCHEMA, Document, queries_of, read_document, show_results

_FORM = "a document is text, or has 'text' or 'contents' and optionally 'title'"


@TOOLS.register
class Search(BaseTool):
    """Finds the documents of ``corpus`` that match a query best.

    ``corpus`` is a ``.jsonl`` or ``.parquet`` file with a document in each row, or a ``.txt`` file with one in each
    line.
    """

    tool_schema = SEARCH_SCHEMA

    def __init__(
        self,
        *,
        corpus: Path,
        topk: Annotated[int, AtLeast(1)] = 3,
        stopwords: Literal["english", "none"] = "english",
        tool_schema: Any = None,
    ) -> None:
        super().__init__(tool_schema=tool_schema)
        self._bm25s = _import_bm25s()
        self._stopwords = stopwords if stopwords != "none" else []
        self._documents = list(read_corpus(corpus))
        if not self._documents:
            raise DataError(f"{corpus}: has no documents")
        self._topk = min(topk, len(self._documents))
        self._index = self._bm25s.BM25()
        texts = [f"{each.title} {each.text}" for each in self._documents]
        self._index.index(self._tokenize(texts), show_progress=False)

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:  # type: ignore[override]
        queries = queries_of(parameters)
        if not queries:
            return ToolResponse("Error: give a query.", metrics={"errors": 1.0})
        results = [self._find(query) for query in queries]
        return ToolResponse(
            show_results(queries, results), metrics={"documents": float(sum(len(found) for found in results))}
        )

    def _find(self, query: str) -> list[Document]:
        """Documents that share a word with the query, the best first."""
        tokens = self._tokenize([query])
        if not tokens[0]:
            return []
        numbers, scores = self._index.retrieve(tokens, k=self._topk, show_progress=False)
        return [self._documents[number] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]

    def _tokenize(self, texts: list[str]) -> Any:
        return self._bm25s.tokenize(texts, stopwords=self._stopwords, return_ids=False, show_progress=False)


def read_corpus(path: Path) -> Iterator[Document]:
    """The documents of a file; ``DataError`` names the line or row that has none."""
    if not path.is_file():
        raise DataError(f"{path}: no such file{similar_path(path)}")
    if path.suffix == ".parquet":
        rows: Iterator[tuple[str, Any]] = _parquet_rows(path)
    elif path.suffix in (".jsonl", ".json"):
        rows = _json_lines(path)
    elif path.suffix == ".txt":
        rows = _lines(path)
    else:
        raise DataError(f"{path}: must end in .jsonl, .parquet or .txt")
    for place, row in rows:
        document = read_document(row)
        if document is None:
            raise DataError(f"{place}: not a document; {_FORM}")
        yield document


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", line.strip()


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for place, line in _lines(path):
        try:
            yield place, json.loads(line)
        except ValueError as error:
            raise DataError(f"{place}: not valid JSON: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet as parquet

    number = 0
    try:
        file = parquet.ParquetFile(path)
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                yield f"{path}: row {number}", row
                number += 1
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error


def _import_bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise HeadwaterError(f"the tool search needs bm25s: pip install 'headwater[search]' ({error})") from error
    return bm25s
