"""Search over a local corpus, and remote services that work, are slow, are down, or answer nonsense."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from patience import long_enough
from tools.boxes import ask, call, toolbox
from tools.services import retrieval, run_code

from headwater.core.errors import ConfigError, HeadwaterError
from headwater.tools import http

DOCUMENTS = [
    ("Oslo", "Oslo is the capital of Norway, at the end of a fjord."),
    ("Bern", "Bern is the capital of Switzerland."),
    ("Fjord", "A fjord is a long inlet. Glaciers make a fjord."),
    ("Go", "Go is a board game. It is played with black and white stones."),
]


@pytest.fixture
def _small_limits(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(http, "_MAX_ANSWER_BYTES", 100_000)


def test_search_finds_documents_of_every_kind_of_corpus(tmp_path):
    rows = [{"title": title, "text": text} for title, text in DOCUMENTS]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(each) for each in rows) + "\n\n")
    contents = [json.dumps({"id": 3, "contents": f'"{title}"\n{text}'}) for title, text in DOCUMENTS]
    (tmp_path / "b.jsonl").write_text("\n".join(contents))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_text("\n".join(text for _, text in DOCUMENTS))
    for name in ("a.jsonl", "b.jsonl", "c.parquet", "d.txt"):
        box = toolbox(use=("search",), args={"search": {"corpus": str(tmp_path / name), "topk": 2}})
        fjord, go, nothing, empty = ask(
            box, *(call("search", query=query) for query in ("What is a fjord?", "board game", "xylophone", ""))
        )
        title = "" if name == "d.txt" else " (Title: Fjord)"
        assert fjord.text.startswith(f"Doc 1{title}: A fjord is a long inlet.")
        assert "Doc 2" in fjord.text
        assert "Oslo is the capital" in fjord.text
        assert "black and white stones" in go.text
        assert nothing.text == empty.text == "No documents found."
        assert (fjord.metrics, nothing.metrics) == ({"documents": 2.0}, {"documents": 0.0})


def test_a_corpus_that_cannot_be_used(tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "wrong.jsonl").write_text('{"text": "fine"}\n{"name": "no text"}\n')
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "a.parquet").write_text("this is not Parquet")
    (tmp_path / "a.csv").write_text("a")
    for name, expected in (
        ("empty.txt", "has no documents"),
        ("wrong.jsonl", "wrong.jsonl:2: not a document; a document is text, or has 'text'"),
        ("broken.jsonl", "broken.jsonl:1: not valid JSON"),
        ("a.parquet", "cannot be read as Parquet"),
        ("a.csv", "must end in .jsonl, .parquet or .txt"),
        ("wrong.json", "no such file; did you mean .*wrong.jsonl"),
    ):
        with pytest.raises(HeadwaterError, match=f"tools.use = search: .*{expected}"):
            toolbox(use=("search",), args={"search": {"corpus": str(tmp_path / name)}})
    with pytest.raises(ConfigError, match=r"tools.args.search.corpus: is missing; this tool requires it"):
        toolbox(use=("search",))


@pytest.mark.usefixtures("_small_limits")
def test_a_search_service():
    long_enough(_check_search, 1.0, 10.0)


def _check_search(limit_s: float) -> None:
    with retrieval([f"{title}\n{text}" for title, text in DOCUMENTS]) as service:
        settings = {"url": service.url, "topk": 2, "attempt_timeout_s": limit_s}
        box = toolbox(use=("http_search",), args={"http_search": settings}, timeout_s=20 * limit_s)
        box.check()
        service.requests.clear()
        service.next = [
            None,  # answered
            503, "",  # tried again, then nonsense
            1.5 * limit_s, None,  # too slow, tried again
            *(4 * [500]),  # not available after three retries
            404,  # not tried again
            {"result": []}, {"result": [["text", 3]]}, {"result": ["text"]}, [1], "x" * 1_000_000,
        ]  # fmt: skip
        results = ask(box, *(call("search", query="Oslo") for _ in range(10)))
    assert results[0].text == "Doc 1 (Title: Oslo): Oslo is the capital of Norway, at the end of a fjord."
    assert service.requests[0] == {"queries": ["Oslo"], "topk": 2, "return_scores": True}
    assert [each.failure for each in results] == [
        None, "bad_result", None, "unavailable", "unavailable", *(5 * ["bad_result"])
    ]  # fmt: skip
    assert "status 500: planned (tried 4 times)" in results[3].text
    assert "status 404" in results[4].text


@pytest.mark.usefixtures("_small_limits")
def test_a_service_that_is_down_or_another_one_is_found_before_training():
    with run_code() as other, retrieval([]) as gone:
        for name, url, expected in (
            ("http_search", f"{other.url}/run_code", "without one list of documents for each query; is this a service"),
            ("sandbox_fusion", f"{gone.url}/retrieve", "answered with status 500"),
            ("http_search", f"{other.url}/nothing", "answered with status 404"),
        ):
            other.next = [{"status": "Success"}]
            box = toolbox(use=(name,), args={name: {"url": url, "num_retries": 0}})
            with pytest.raises(ConfigError, match=f"tool \\w+: .*{expected}"):
                box.check()
    down = toolbox(use=("http_search",), args={"http_search": {"url": gone.url, "num_retries": 1}})
    with pytest.raises(ConfigError, match=r"tool search: .*Cannot connect.*\(tried 2 times\)"):
        down.check()
    assert ask(down, call("search", query="x"))[0].failure == "unavailable"
    with pytest.raises(ConfigError, match="url = 'localhost:8000': must begin with http"):
        toolbox(use=("http_search",), args={"http_search": {"url": "localhost:8000"}})


@pytest.mark.usefixtures("_small_limits")
def test_a_remote_sandbox():
    with run_code() as service:
        box = toolbox(use=("sandbox_fusion",), args={"sandbox_fusion": {"url": service.url, "run_timeout_s": 3}})
        box.check()
        service.requests.clear()
        service.next = [
            None, None, None,
            {"status": "SandboxError", "message": "no worker"},
            {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "so far"}},
            {"status": "Failed", "compile_result": {"status": "Error", "return_code": 1, "stderr": "no semicolon"}},
            {"status": "Failed", "message": "no such language"},
            {"status": "Perhaps"},
            {"status": "Success", "run_result": "text"},
        ]  # fmt: skip
        codes = ["print(6 * 7)", "x = 1", "print('a'); 1 / 0", *("" for _ in range(6))]
        results = ask(box, *(call("code_interpreter", code=code) for code in codes))
    assert service.requests[0] == {
        "code": "print(6 * 7)", "language": "python", "run_timeout": 3.0, "compile_timeout": 10.0,
        "memory_limit_MB": 1024,
    }  # fmt: skip
    assert [each.text for each in results[:7]] == [
        "42",
        "(no output; print the values that you need)",
        "a\nZeroDivisionError: division by zero",
        f"Error: code_interpreter is not available: {service.url}/run_code: the sandbox failed: no worker",
        "so far\nError: the program took too long",
        "no semicolon",
        "Error: no such language",
    ]
    assert [each.metrics.get("errors") for each in results[:7]] == [0.0, 0.0, 1.0, None, 1.0, 1.0, 1.0]
    assert [each.failure for each in results[7:]] == ["bad_result", "bad_result"]
