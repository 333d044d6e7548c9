"""Reading weights that lie elsewhere: which files of a folder count, and what shared memory may hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from headwater.core.errors import WeightsError
from headwater.weights.source import read_file, shared_tensors, write_shared

pytestmark = pytest.mark.timeout(60)

INDEX = "model.safetensors.index.json"


@contextmanager
def shared(image: bytes) -> Iterator[str]:
    """The name of a segment that holds ``image``."""
    segment = write_shared(image)
    try:
        yield segment.name
    finally:
        segment.close()
        segment.unlink()


# Folders


def write_parts(folder):
    save_file({"a": torch.ones(1), "b": torch.zeros(1)}, folder / "part-1.safetensors")
    save_file({"b": torch.ones(2)}, folder / "part-2.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}')


def sizes(folder):
    return {name: tensor.numel() for name, tensor in read_file(str(folder))}


@pytest.mark.parametrize("stray", ["consolidated", "model", "part-3"])
def test_of_a_folder_with_an_index_only_what_it_names_is_read(tmp_path, stray):
    write_parts(tmp_path)
    save_file({"a": torch.ones(9), "b": torch.ones(9), "c": torch.ones(9)}, tmp_path / f"{stray}.safetensors")
    assert sizes(tmp_path) == {"a": 1, "b": 2}


def test_a_folder_without_an_index_is_its_model_file_or_all_files(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "first.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "second.safetensors")
    assert sizes(tmp_path) == {"a": 1, "b": 2}
    save_file({"c": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert sizes(tmp_path) == {"c": 3}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is no index of weights"),
        ("[]", "is no index of weights"),
        ("{}", "is no index of weights .*weight_map"),
        ('{"weight_map": ["a"]}', "is no index of weights"),
        ('{"weight_map": {"a": 5}}', "is no index of weights"),
        ('{"weight_map": {"a": "../part-1.safetensors"}}', "not the name of a file beside it"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors: cannot be read"),
        ('{"weight_map": {"c": "part-1.safetensors"}}', "says that part-1.safetensors holds c, which it does not"),
    ],
)
def test_an_index_that_is_damaged_or_untrue_is_refused(tmp_path, index, message):
    write_parts(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(WeightsError, match=message):
        read_file(str(tmp_path))


# Shared memory


def test_shared_tensors_are_views_that_keep_the_memory_they_show():
    sent = {
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "ids": torch.arange(9),
        "half": torch.rand(7).half(),
    }
    segment = write_shared(save({**sent, "bytes": torch.zeros(3, dtype=torch.uint8)}))
    with shared_tensors(segment.name) as tensors:
        kept = dict(tensors)
    assert tensors == [], "the block over, only who keeps a tensor keeps the memory"
    segment.buf[-1] = 7  # the smallest numbers come last
    assert kept.pop("bytes").tolist() == [0, 0, 7], "what the owner writes is seen, so nothing was copied"
    segment.close()
    segment.unlink()
    assert kept.keys() == sent.keys()
    assert all(torch.equal(kept[name], sent[name]) and kept[name].dtype == sent[name].dtype for name in sent)


def test_a_shared_tensor_at_an_odd_address_is_copied_to_an_even_one():
    header = json.dumps(entry()).encode()
    header += b" " * (1 - len(header) % 2)
    with (
        shared(len(header).to_bytes(8, "little") + header + torch.ones(2).numpy().tobytes()) as name,
        shared_tensors(name) as [(_, tensor)],
    ):
        assert (tensor.tolist(), tensor.data_ptr() % 4) == ([1.0, 1.0], 0)


OWNER_AND_READER = """
import torch
from safetensors.torch import save
from headwater.weights.source import shared_tensors, write_shared

segment = write_shared(save({"a": torch.ones(3)}))
with shared_tensors(segment.name) as tensors:
    print(tensors[0][1].tolist())
segment.close()
segment.unlink()
"""


def test_a_segment_may_be_read_in_the_process_that_made_it():
    """Python keeps a list of segments to clean up; it complains of one that was struck off twice."""
    command = [sys.executable, "-c", OWNER_AND_READER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[1.0, 1.0, 1.0]", "")


def image_of(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\x00" * 64


def entry(**changed):
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}}


NO_IMAGES = {
    "zeros": b"\x00" * 64,
    "ones": b"\xff" * 40,
    "text": b"not a tensor" * 9,
    "less than a length": b"\x01",
    "a list": image_of([]),
    "nothing": image_of({}),
    "only notes": image_of({"__metadata__": {"format": "pt"}}),
    "nested too deeply": image_of(b"[" * 100_000),
    "a tensor that is text": image_of({"a": "F32"}),
    "no offsets": image_of(entry(data_offsets=[])),
    "three offsets": image_of(entry(data_offsets=[0, 8, 16])),
    "offsets that are texts": image_of(entry(data_offsets=["0", "8"])),
    "offsets backwards": image_of(entry(data_offsets=[8, 0])),
    "offsets beyond the end": image_of(entry(shape=[2000], data_offsets=[0, 8000])),
    "a hole": image_of(entry(data_offsets=[8, 16])),
    "too few bytes": image_of(entry(shape=[3])),
    "negative sizes": image_of(entry(shape=[-1, -2])),
    "a size beyond measure": image_of(entry(shape=[0, 10**30], data_offsets=[0, 0])),
    "no shape": image_of(entry(shape=None)),
    "an unknown type": image_of(entry(dtype="F31")),
    "a list for a type": image_of(entry(dtype=[])),
}


@pytest.mark.parametrize("name", NO_IMAGES)
def test_what_is_no_safetensors_image_is_refused(name):
    with (
        shared(NO_IMAGES[name]) as segment,
        pytest.raises(WeightsError, match=f"{segment}': holds no safetensors image"),
        shared_tensors(segment),
    ):
        pass


def test_the_image_of_the_cases_above_is_read():
    with shared(image_of(entry())) as name, shared_tensors(name) as [(_, tensor)]:
        assert tensor.tolist() == [0.0, 0.0]


GOOD = save({"first": torch.rand(3, 2), "second": torch.ones(4, dtype=torch.bfloat16)})
BITS_OF_JSON = st.sampled_from([b"[]", b"{}", b"-", b"9", b"null", b'"', b","])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 3), BITS_OF_JSON | st.binary(max_size=3))))
def test_a_damaged_image_is_read_or_refused(damage):
    image = bytearray(GOOD)
    for place, length, instead in damage:
        image[place : place + length] = instead
    with shared(bytes(image)) as name:
        try:
            with shared_tensors(name) as tensors:
                assert len(tensors) <= 2
        except WeightsError:
            assert damage


@pytest.mark.parametrize("name", ["nowhere", "a/b", "../x", "", "a\x00b", "\ud800", "x" * 5000])
def test_a_segment_that_is_not_there_is_refused(name):
    with pytest.raises(WeightsError, match="cannot be opened"), shared_tensors(name):
        pass
