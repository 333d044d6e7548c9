"""``data.sources``, datasets of the hub, remote files, and mixtures."""

from __future__ import annotations

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import datasets
import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.config.load import load_config
from headwater.core.errors import ConfigError, DataError
from headwater.data.load import load_dataset
from headwater.data.remote import fetch, open_dataset
from headwater.data.sampler import DataPart, MixingSampler
from headwater.models.load import load_tokenizer
from headwater.rollout.source import PromptStream


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny:qwen3")


def write(path: Path, texts) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "n": 1}) + "\n" for text in texts))
    return str(path)


def load(tokenizer, data, split="train"):
    return load_dataset(load_config(None, [{"data": data}]).config.data, tokenizer, split, seed=1)


def test_settings_of_sources(tokenizer, tmp_path):
    questions = [{"question": f"q{n}", "answer": n, "level": "easy"} for n in range(20)]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, questions)))
    asked = {
        "source": str(tmp_path / "asked.jsonl"),
        "columns": {"prompt": "question", "ground_truth": "answer"},
        "system_prompt": "Be brief.",
        "data_source": "gsm8k",
        "max_rows": 5,
    }
    plain = write(tmp_path / "plain.jsonl", ["p0", "p1"])
    given = {"train": ["asked", plain], "system_prompt": "Everywhere.", "sources": {"asked": asked}}
    data = load(tokenizer, given)
    assert len(data) == 7
    first, last = data[0], data[6]
    assert first.messages[0]["content"] == "Be brief."
    assert first.messages[1]["content"] == f"q{first.ground_truth}"
    assert (first.data_source, first.source, first.columns["level"]) == ("gsm8k", "asked", "easy")
    assert (last.messages[0]["content"], last.source, last.data_source) == ("Everywhere.", "plain", "plain")
    assert [(part.name, part.start, part.stop) for part in data.parts] == [("asked", 0, 5), ("plain", 5, 7)]


def test_wrong_settings_of_sources(tmp_path):
    rows = write(tmp_path / "rows.jsonl", ["a"])
    wrong = {
        "wieght": (1, "no such key; did you mean 'weight'"),
        "weight": (0, "must be a number > 0"),
        "max_rows": (-1, "must be a whole number >= 1"),
        "subset": ("main", "only a dataset of the hub or a folder has one"),
        "columns": (["a"], "must be a mapping of names to columns"),
        "system_prompt": ("", "must be text"),
    }
    for field, (value, message) in wrong.items():
        with pytest.raises(ConfigError, match=message):
            load_config(None, [{"data": {"train": ["x"], "sources": {"x": {"source": rows, field: value}}}}])
    with pytest.raises(ConfigError, match=r"neither data.train nor data.eval has this name"):
        load_config(None, [{"data": {"sources": {"x": {"source": rows}}}}])
    with pytest.raises(ConfigError, match=r"only data.train is mixed by weight"):
        load_config(None, [{"data": {"eval": ["x"], "sources": {"x": {"source": rows, "weight": 2}}}}])
    with pytest.raises(DataError, match="no column 'question'"):
        load(None, {"train": ["x"], "sources": {"x": {"source": rows, "columns": {"prompt": "question"}}}})


def test_a_mixture_is_drawn_by_weight_and_counted(tokenizer, tmp_path):
    sources = {
        "few": {"source": write(tmp_path / "few.jsonl", "ab"), "weight": 3},
        "many": {"source": write(tmp_path / "many.jsonl", "cdefghij"), "weight": 1},
    }
    stream = PromptStream(load(tokenizer, {"train": ["few", "many"], "sources": sources}), seed=0, shuffle=True)
    draws = stream.take(16)
    assert Counter(draw.prompt.source for draw in draws) == {"few": 12, "many": 4}
    assert len({draw.prompt.uid for draw in draws if draw.prompt.source == "many"}) == 4
    assert stream.metrics(draw.prompt for draw in draws[:4]) == {
        "data/few/prompts": 3, "data/many/prompts": 1, "data/few/drawn": 12, "data/many/drawn": 4,
        "data/few/epoch": 6, "data/many/epoch": 0,
    }  # fmt: skip
    again = stream.again(draws[3].index, draws[3].epoch)
    assert (again.prompt.uid, again.rng_key) == (draws[3].prompt.uid, draws[3].rng_key)


def test_prompts_that_were_prepared_are_the_same_and_built_once(tokenizer, tmp_path):
    def stream():
        return PromptStream(load(tokenizer, {"train": [write(tmp_path / "rows.jsonl", "abcdefgh")]}), 0, shuffle=True)

    plain, prepared, built = stream(), stream(), []
    row_of = prepared._dataset._read_row
    prepared._dataset._read_row = lambda number: built.append(number) or row_of(number)
    assert prepared.take(3) == plain.take(3)
    before = prepared.state_dict()
    prepared.prepare(4)
    assert prepared.state_dict() == before
    assert len(built) == 7
    assert prepared.take(6) == plain.take(6)  # across the end of an epoch, and more than were prepared
    assert len(built) == 9


def test_an_error_of_a_prepared_prompt_is_raised_when_it_is_taken(tokenizer, tmp_path):
    stream = PromptStream(load(tokenizer, {"train": [write(tmp_path / "rows.jsonl", "abcd")]}), 0, shuffle=False)

    def fails(number):
        raise DataError(f"row {number} has changed")

    stream._dataset._read_row = fails
    stream.prepare(2)
    with pytest.raises(DataError, match="row 0 has changed"):
        stream.take(1)


@settings(max_examples=50, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    takes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    seed=st.integers(0, 9),
)
def test_shares_are_exact_and_a_resumed_mixture_continues(weights, takes, seed):
    parts = [DataPart(f"p{n}", 3 * n, 3 * n + 3, weight) for n, weight in enumerate(weights)]
    sampler, whole = MixingSampler(parts, seed), MixingSampler(parts, seed).take(sum(takes) + 5)
    drawn = [draw for count in takes for draw in sampler.take(count)]
    assert drawn == whole[: len(drawn)]
    counts = Counter(draw.index // 3 for draw in drawn)
    for number, weight in enumerate(weights):
        ahead = counts[number] - weight / sum(weights) * len(drawn)
        assert -max(1, len(weights) - 1) - 1e-9 < ahead < 1
    resumed = MixingSampler(parts, seed)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert resumed.take(5) == whole[len(drawn) :]
    if len(parts) > 1:
        with pytest.raises(DataError, match="have changed since the checkpoint"):
            MixingSampler(parts[1:], seed).load_state_dict(sampler.state_dict())


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_two_files_of_the_same_name_have_labels_of_their_own(tokenizer, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    files = [write(tmp_path / folder / "train.jsonl", [folder]) for folder in ("a", "b")]
    data = load(tokenizer, {"train": files})
    assert [part.name for part in data.parts] == ["train", "train#2"]
    assert [(prompt.source, prompt.uid) for prompt in (data[0], data[1])] == [
        ("train", "train/train/0"),
        ("train#2", "train#2/train/0"),
    ]


def test_remote_files_are_cached(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    served = tmp_path / "served"
    served.mkdir()
    write(served / "rows.jsonl", ["a", "b"])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(served)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/rows.jsonl"
    try:
        data = load(tokenizer, {"train": [url]})
        assert [data[0].uid, len(data)] == ["rows/train/0", 2]
        (copy,) = fetch(url, tmp_path / "cache" / "data")
        changed = copy.stat().st_mtime_ns
        assert fetch(url, tmp_path / "cache" / "data") == (copy,)
        assert copy.stat().st_mtime_ns == changed  # not copied again
        write(served / "rows.jsonl", ["a", "b", "c"])
        assert len(load(tokenizer, {"train": [url]})) == 3
        with pytest.raises(DataError, match="no such file; check the address"):
            load(tokenizer, {"train": [url.replace("rows", "missing")]})
    finally:
        server.shutdown()
        server.server_close()
        thread.join(300)
    fsspec.filesystem("http").clear_instance_cache()
    assert len(load(tokenizer, {"train": [url]})) == 3  # the server is gone: the copy is used


def test_other_file_systems(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    for name in ("one", "two"):
        memory.pipe(f"/data18/{name}.jsonl", json.dumps({"prompt": name}).encode())
    assert len(load(tokenizer, {"train": ["memory://data18/*.jsonl"]})) == 2
    local = write(tmp_path / "rows.jsonl", ["a"])
    assert load(tokenizer, {"train": [f"file://{local}"]})[0].uid == "rows/train/0"
    with pytest.raises(DataError, match="no file matches"):
        load(tokenizer, {"train": ["memory://data18/*.parquet"]})


def test_folders_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    rows = {split: datasets.Dataset.from_list([{"prompt": split}]) for split in ("train", "test")}
    repository = tmp_path / "repository"
    repository.mkdir()
    for split, each in rows.items():
        each.to_parquet(repository / f"{split}-00000-of-00001.parquet")
    assert open_dataset(str(repository), "train")[0] == {"prompt": "train"}
    assert open_dataset(str(repository), "eval")[0] == {"prompt": "test"}
    assert open_dataset(str(repository), "train", wanted="test").name == "repository"
    with pytest.raises(DataError, match="name the subset and the split"):
        open_dataset(str(repository), "train", wanted="tset")
    saved = tmp_path / "saved"
    datasets.DatasetDict(rows).save_to_disk(saved)
    assert open_dataset(str(saved), "train", wanted="test")[0] == {"prompt": "test"}
    with pytest.raises(DataError, match="holds the splits test, train; name one"):
        open_dataset(str(saved), "train")


HUB_SCRIPT = """
import sys
from headwater.data.remote import open_dataset
rows = open_dataset("hub:someone/sums/easy", "train")
print(rows.name, len(rows), rows[0]["prompt"])
try:
    open_dataset("hub:someone/other", "train")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_dataset_in_the_cache_of_the_hub_works_offline(tmp_path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "datasets--someone--sums"
    snapshot = cached / "snapshots" / revision
    (snapshot / "easy").mkdir(parents=True)
    datasets.Dataset.from_list([{"prompt": "1 + 1 ="}]).to_parquet(snapshot / "easy" / "train.parquet")
    card = "---\nconfigs:\n- config_name: easy\n  data_files:\n  - split: train\n    path: easy/train.parquet\n---\n"
    (snapshot / "README.md").write_text(card)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", HUB_SCRIPT], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert result.stdout.startswith("sums 1 1 + 1 ="), result.stderr
    assert "DataError" in result.stdout
    assert "Without internet" in result.stdout
