"""``http_search``: a retrieval service with Search-R1's protocol.

A request is ``{"queries": [...], "topk": 3, "return_scores": true}``. The answer is ``{"result": [[{"document":
{"contents": "title\\ntext"}, "score": 0.9}, ...], ...]}``, with one list for each query.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from headwater.config.constraints import AtLeast, MoreThan
from headwater.tools import TOOLS
from headwater.tools.base import BaseTool, ToolResponse, ToolUnavailable
from headwater.tools.documents import SEARCH_SCHEMA, Document, queries_of, read_document, show_results
from headwater.tools.http import HttpService
from headwater.tools.results import BadResult


@TOOLS.register
class HttpSearch(BaseTool):
    """Asks a search service for documents."""

    tool_schema = SEARCH_SCHEMA

    def __init__(
        self,
        *,
        url: str,
        topk: Annotated[int, AtLeast(1)] = 3,
        num_retries: Annotated[int, AtLeast(0)] = 3,
        attempt_timeout_s: Annotated[float, MoreThan(0)] = 10.0,
        max_connections: Annotated[int, AtLeast(1)] = 64,
        tool_schema: Any = None,
    ) -> None:
        super().__init__(tool_schema=tool_schema)
        self._topk = topk
        self.max_concurrent = max_connections  # the time limit of a call does not count while it waits for a connection
        self._service = HttpService(
            url,
            "/retrieve",
            attempt_timeout_s=attempt_timeout_s,
            num_retries=num_retries,
            max_connections=max_connections,
        )

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        queries = queries_of(parameters)
        if not queries:
            return ToolResponse("Error: give a query.", metrics={"errors": 1.0})
        results = await self._search(queries)
        return ToolResponse(
            show_results(queries, results), metrics={"documents": float(sum(len(found) for found in results))}
        )

    async def check(self) -> None:
        try:
            await self._search(["test"])
        except BadResult as error:
            raise ToolUnavailable(f"{error}; is this a service with Search-R1's protocol?") from error
        finally:
            await self._service.close()

    async def close(self) -> None:
        await self._service.close()

    async def _search(self, queries: list[str]) -> list[list[Document]]:
        answer = await self._service.post({"queries": queries, "topk": self._topk, "return_scores": True})
        found = answer.get("result") if isinstance(answer, Mapping) else None
        if not isinstance(found, list) or len(found) != len(queries):
            raise BadResult(f"got an answer from {self._service.url} without one list of documents for each query")
        return [_documents(each, self._service.url) for each in found]


def _documents(found: Any, url: str) -> list[Document]:
    if not isinstance(found, list):
        raise BadResult(f"got an answer from {url} in which 'result' is not a list of lists")
    documents = []
    for entry in found:
        nested = entry.get("document", entry) if isinstance(entry, Mapping) else entry
        document = read_document(nested)
        if document is None:
            raise BadResult(f"got an answer from {url} with a document that has no text")
        documents.append(document)
    return documents
