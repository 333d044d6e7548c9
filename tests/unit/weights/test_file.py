"""Weights through a file: what is written is read, which files of a folder count, and what killed processes leave."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from headwater.core.errors import TransferLost, WeightsError
from headwater.core.protocols import WeightUpdate
from headwater.weights import ControlCall, file
from headwater.weights.file import FileTransport, FileWeights, remove_leftovers
from headwater.weights.memory import in_buckets
from headwater.weights.safetensors_files import OpenedFiles, open_weights

INDEX = "model.safetensors.index.json"


def parameters():
    return [(name, parameter.detach()) for name, parameter in tiny.model().named_parameters()]


def shapes_of(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def written(tensors, dtype=torch.float32):
    weights = FileWeights(shapes_of(tensors), dtype)
    weights.write(in_buckets(tensors, max_bytes=2**14))
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_bucket_by_bucket_is_read(dtype):
    expected = {name: tensor.to(dtype) for name, tensor in parameters()}
    weights = written(list(reversed(parameters())), dtype)
    with open_weights(weights.path) as source:
        assert source.shapes == shapes_of(parameters())
        read = {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket}
    for found in (load_file(weights.path), read):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert oct(os.stat(weights.path.parent).st_mode & 0o077) == "0o0"
    weights.discard()
    weights.discard()
    assert not weights.path.parent.exists()


def test_buckets_that_are_not_what_was_announced_are_refused():
    tensors = [("a", torch.zeros(2)), ("b", torch.zeros(3))]
    streams = {
        "1 tensors did not arrive, for example b": [tensors[:1]],
        "a of shape .* came twice": [tensors, tensors],
        "c of shape .* was not announced": [[*tensors, ("c", torch.zeros(1))]],
        r"b of shape \(4,\)": [[("b", torch.zeros(4))]],
    }
    for message, buckets in streams.items():
        weights = FileWeights(shapes_of(tensors), torch.float32)
        with pytest.raises(WeightsError, match=message):
            weights.write(buckets)
        weights.discard()


# Folders


def write_parts(folder):
    save_file({"a": torch.ones(1), "b": torch.zeros(1)}, folder / "part-1.safetensors")
    save_file({"b": torch.ones(2)}, folder / "part-2.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}')


def sizes(folder):
    with open_weights(str(folder)) as source:
        found = {name: tensor.numel() for bucket in source.buckets() for name, tensor in bucket}
        assert source.shapes == {name: (size,) for name, size in found.items()}
    return found


def test_of_a_folder_with_an_index_only_what_it_names_is_read(tmp_path):
    write_parts(tmp_path)
    for stray in ("consolidated", "model", "part-3"):
        save_file({"a": torch.ones(9), "b": torch.ones(9), "c": torch.ones(9)}, tmp_path / f"{stray}.safetensors")
    assert sizes(tmp_path) == {"a": 1, "b": 2}


def test_a_folder_without_an_index_is_its_model_file_or_all_files(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "first.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "second.safetensors")
    assert sizes(tmp_path) == {"a": 1, "b": 2}
    save_file({"c": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert sizes(tmp_path) == {"c": 3}


def test_an_index_that_is_damaged_or_untrue_is_refused(tmp_path):
    write_parts(tmp_path)
    wrong = {
        "{": "not a valid index of weights",
        "[]": "not a valid index of weights",
        "{}": "not a valid index of weights .*weight_map",
        '{"weight_map": ["a"]}': "not a valid index of weights",
        '{"weight_map": {"a": 5}}': "not a valid index of weights",
        '{"weight_map": {"a": "../part-1.safetensors"}}': "not the name of a file in the same folder",
        '{"weight_map": {"a": "gone.safetensors"}}': "gone.safetensors: cannot be read",
        '{"weight_map": {"c": "part-1.safetensors"}}': "says that part-1.safetensors contains c, which it does not",
    }
    for index, message in wrong.items():
        (tmp_path / INDEX).write_text(index)
        with pytest.raises(WeightsError, match=message), open_weights(tmp_path):
            pass


# What is left behind

WRITER = """
import sys, torch
from headwater.weights.file import FileWeights

adapters = {"name": "adapter_model.safetensors", "texts": {"adapter_config.json": "{}"}}
kept = [FileWeights({"w": (3,)}, torch.float32), FileWeights({"w": (3,)}, torch.float32, **adapters)]
print(kept[0].path, flush=True)
sys.stdin.readline()
"""


def test_weights_of_a_process_that_was_killed_are_removed_and_those_of_the_living_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    mine = written(parameters())
    (tmp_path / "headwater-weights-of-somebody").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        theirs = Path(writer.stdout.readline().strip()).parent
        others = {*theirs.parent.iterdir()} - {mine.path.parent}
        assert f"-{writer.pid}-" in theirs.name
        assert remove_leftovers() == []
        # As seen from another container, where no process has that id: the lock still shows that it is alive.
        with monkeypatch.context() as patch:
            patch.setattr(file, "process_start", lambda pid: None)
            assert remove_leftovers() == []
        writer.kill()
        writer.wait(60)
        removed = set(remove_leftovers())
    assert theirs in removed
    assert removed == others - {tmp_path / "headwater-weights-of-somebody"}
    assert len(removed) == 2
    assert not any(each.exists() for each in removed)
    assert load_file(mine.path)
    mine.discard()


def test_a_file_for_several_engines_is_written_once_and_removed_when_the_last_one_discards_it(tmp_path):
    update = WeightUpdate.of(12, [("w", torch.ones(2))])
    written = file.written_file(update, torch.float32, str(tmp_path))
    [folder] = tmp_path.iterdir()
    assert folder.name.endswith("-v000012")
    shared = replace(update, buckets=iter([[("not", "read")]]), file=written)
    channels = [FakeChannel(), FakeChannel()]
    transports = [FileTransport(torch.float32), FileTransport(torch.float32)]
    for transport, channel in zip(transports, channels, strict=True):
        transport.send(shared, channel, None)
        assert Path(channel.again[0].body["source"]["file"]) == written.path
    written.discard()
    transports[0].close()
    assert written.path.is_file(), "the other engine may be restarted"
    transports[1].close()
    assert not folder.exists()
    with pytest.raises(WeightsError, match="was removed, because its update has ended"):
        transports[0].send(shared, channels[0], None)


def test_the_first_update_removes_what_a_killed_process_has_left_in_the_folder(tmp_path):
    """Also that of an engine which loads files itself."""
    left = [tmp_path / f"headwater-weights-{2**22 + 1}-x8k2{end}" for end in ("-v000012", ".partial")]
    for folder in left:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"")
    written = file.written_file(WeightUpdate.of(1, [("w", torch.ones(2))]), torch.float32, str(tmp_path))
    assert list(tmp_path.iterdir()) == [written.path.parent]
    written.discard()


def test_no_space_is_told_with_a_remedy_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightsError, match=r"No space left on device.*TMPDIR"):
        FileWeights({"w": (3,)}, torch.float32)
    assert list(tmp_path.iterdir()) == []


class FakeChannel:
    """A process that takes every file, and may be replaced before that is noted."""

    limit_s = 4000.0

    def __init__(self) -> None:
        self.again: list[ControlCall | None] = []
        self.is_lost = False

    def call(self, call: ControlCall) -> Future[dict[str, Any]]:
        assert Path(call.body["source"]["file"]).is_file()
        assert call.body["limit_s"] == self.limit_s
        done: Future[dict[str, Any]] = Future()
        done.set_result({})
        return done

    def accepted(self, again: ControlCall | None) -> None:
        if self.is_lost:
            raise TransferLost("replaced")
        assert again is not None
        assert all(Path(each.body["source"]["file"]).is_file() for each in self.again), "it may be needed until now"
        self.again.append(again)

    def incomplete(self) -> None: ...


def test_values_are_checked_by_who_writes_them_and_then_read_once(monkeypatch):
    channel, transport = FakeChannel(), FileTransport(torch.float16)
    for value in (torch.nan, 1e30):  # the second is infinite in the number type that is sent
        with pytest.raises(WeightsError, match="w holds values that are NaN or infinite as"):
            transport.send(WeightUpdate.of(1, [("w", torch.full((2,), value))]), channel, None)
    assert not channel.again
    transport.send(WeightUpdate.of(1, [("w", torch.ones(2))]), channel, None)
    [again] = channel.again
    assert again.body["source"]["is_checked"], "a process that replaces the first one reads it once, too"
    reads, buckets = [], OpenedFiles.buckets
    monkeypatch.setattr(OpenedFiles, "buckets", lambda self: reads.append(1) or buckets(self))
    for is_checked, num_reads in ((True, 1), (False, 2)):
        reads.clear()
        path = again.body["source"]["file"]
        with file.file_update(path, 1, torch.float16, is_checked=is_checked) as update:
            assert [(name, each.tolist()) for bucket in update.buckets for name, each in bucket] == [("w", [1.0, 1.0])]
        assert len(reads) == num_reads
    transport.close()


def test_a_file_is_kept_until_a_newer_one_was_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # files of other tests are not counted
    monkeypatch.setattr(tempfile, "tempdir", None)
    channel, transport = FakeChannel(), FileTransport(torch.float32)
    for version in (1, 2):
        transport.send(WeightUpdate.of(version, [("w", torch.zeros(2))]), channel, "drain")
        channel.again = channel.again[-1:]
    [newest] = channel.again
    assert (newest.body["version"], newest.body["mode"]) == (2, None)
    channel.is_lost = True
    with pytest.raises(TransferLost):
        transport.send(WeightUpdate.of(3, [("w", torch.zeros(2))]), channel, None)
    kept = Path(newest.body["source"]["file"])
    assert kept.is_file()
    assert len(list(kept.parent.parent.glob(f"headwater-weights-{os.getpid()}-*"))) == 1
    transport.close()
    transport.close()
    assert not kept.exists()
