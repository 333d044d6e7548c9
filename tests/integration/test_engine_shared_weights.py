"""Weights from another process, through memory that both see."""

from __future__ import annotations

import subprocess
import sys

import pytest
from command import ROOT

from headwater.config.schema import EngineConfig
from headwater.core.errors import WeightsError
from headwater.core.records import ModelRequest, SamplingParams
from headwater.engine.engine import Engine

LIMIT_S = 60
LEARNER = """
import sys
from safetensors.torch import save
from headwater.weights.source import write_shared
from headwater.models.load import load_model

model = load_model("tiny:qwen3", dtype="float32", device="cpu", seed=1)
segment = write_shared(save({name: tensor.detach() for name, tensor in model.named_parameters()}))
print(segment.name, flush=True)
sys.stdin.readline()
segment.close()
segment.unlink()
print("unlinked", flush=True)
"""


@pytest.fixture
def learner():
    process = subprocess.Popen(
        [sys.executable, "-c", LEARNER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait(LIMIT_S)


def response_of(engine: Engine):
    request = ModelRequest("r", (40, 41, 42), SamplingParams(12, temperature=0.0, ignore_end=True), 0)
    return engine.generate([request])[0]


def loaded(seed: int) -> Engine:
    return Engine.load("tiny:qwen3", EngineConfig(kv_cache_gib=0.05), device="cpu", seed=seed)


@pytest.mark.timeout(120)
def test_another_process_hands_over_its_weights_and_may_go_away_afterwards(learner):
    engine, other = loaded(0), loaded(1)
    try:
        before, wanted = response_of(engine), response_of(other)
        name = learner.stdout.readline().strip()
        assert name, learner.stderr.read()
        engine.update_weights_from_shared_memory(name, 9).result(LIMIT_S)
        learner.stdin.write("done\n")
        learner.stdin.flush()
        assert learner.stdout.readline().strip() == "unlinked"
        assert learner.wait(LIMIT_S) == 0
        assert learner.stderr.read() == ""
        after = response_of(engine)
        assert after.output_tokens == wanted.output_tokens != before.output_tokens
        assert set(after.output_versions) == {9}
        with pytest.raises(WeightsError, match=name):
            engine.update_weights_from_shared_memory(name, 10).result(LIMIT_S)
        assert response_of(engine).output_tokens == wanted.output_tokens
    finally:
        engine.close()
        other.close()


READER = """
import sys
from headwater.config.schema import EngineConfig
from headwater.engine.engine import Engine

engine = Engine.load("tiny:qwen3", EngineConfig(kv_cache_gib=0.05), device="cpu", seed=0)
engine.update_weights_from_shared_memory(sys.argv[1], 1).result(60)
engine.close()
"""


@pytest.mark.timeout(120)
def test_an_engine_that_ends_leaves_the_memory_to_its_owner(learner):
    """Python's own clean-up would remove a segment that the process merely read."""
    name = learner.stdout.readline().strip()
    command = [sys.executable, "-c", READER, name]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert (done.returncode, done.stderr) == (0, "")
