"""A DataProto between processes, and what importing it costs."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest
import torch
from test_data_proto_strategy import example

from headwater.core.data_proto import DataProto


def test_a_part_pickles_as_its_own_rows_and_contiguous() -> None:
    data = DataProto.from_dict({"x": torch.zeros(1000, 100), "t": torch.zeros(100, 1000).t()})
    part = data[:2]
    content = pickle.dumps(part)
    assert len(content) < 10_000
    loaded = pickle.loads(content)
    assert loaded.equals(part)
    for batch in (loaded, pickle.loads(pickle.dumps(data))):
        assert all(tensor.is_contiguous() for _, tensor in batch.batch.items())


def test_copies_and_pickles_take_tensors_that_autograd_computed() -> None:
    data = DataProto.from_dict({"x": torch.ones(2, requires_grad=True) * 2})
    assert data.select(deepcopy=True).batch["x"].tolist() == [2, 2]
    for other in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert other.equals(data)
        assert not other.batch["x"].requires_grad


def double_rewards(connection: Connection) -> None:
    data = connection.recv()
    connection.send(data.with_columns(tensors={"reward": 2 * data.batch["reward"]}))
    connection.recv()


@pytest.mark.slow
def test_another_process_gets_and_returns_batches() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=double_rewards, args=(theirs,), daemon=True)
    process.start()
    try:
        ours.send(example())
        assert ours.poll(600), "no answer from the other process"
        answer = ours.recv()
        ours.send("done")
        process.join(600)
    finally:
        process.kill()
    assert answer.equals(example().with_columns(tensors={"reward": torch.tensor([0.0, 2.0, 4.0, 6.0])}))


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, headwater, headwater.core, headwater.core.protocols; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0
