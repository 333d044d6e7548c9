"""LoRA adapters alone, in a real vLLM server on the CPU: log-probs after every update, responses that span updates,
killed servers, tensor parallelism, running servers, and a run that learns.

vLLM runs in a separate environment (``make setup-vllm``). One server is started for most tests of this file.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from command import PROCESS_LIMIT_S, ROOT, metrics, python_of, train_here
from server_answers import (
    LIMIT_S,
    MODEL,
    TOLERANCE,
    ask,
    assert_continued,
    assert_sampled_by,
    still_answers,
)
from unit.engine.adapters import ALPHA, RANK, Adapted

from headwater.backends import SERVER_KEY, BackendContext
from headwater.backends.vllm.engine import VllmEngine
from headwater.config.load import load_config
from headwater.core.capabilities import UpdateMode
from headwater.core.errors import BaseMissing, ConfigError, WeightsError
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.models.device import with_dtype
from headwater.models.load import load_model, load_tokenizer
from headwater.observe.run_directory import RunDirectory
from headwater.observe.spans import Spans
from headwater.weights.publish import AdaptersAlone, StreamChecksums

PYTHON, IS_INSTALLED = python_of("vllm")
NO_VLLM = f"NO REAL VLLM: it is not installed for {PYTHON}; run `make setup-vllm`"
PLAIN = SamplingParams(24, ignore_end=True)
LONG_PROMPT = tuple(5 + each % 200 for each in range(60))
"""More than a page, so that the cache of prompts has one of it."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_INSTALLED, reason=NO_VLLM),
    pytest.mark.xdist_group("vllm"),
]


def context(*settings: str, rank: int = RANK) -> BackendContext:
    base = ["rollout.backend=vllm", "data.max_prompt_tokens=64", "rollout.max_new_tokens=256", f"model.path={MODEL}"]
    base += ["rollout.publish=adapter", f"lora.rank={rank}", f"lora.alpha={ALPHA}"]
    config = with_dtype(load_config("quickstart", [*base, *settings]).config)
    return BackendContext(config, MODEL, load_tokenizer(MODEL), Spans())


def launched(*settings: str, devices: int = 1) -> VllmEngine:
    launch = ("rollout.placement=disaggregated", f"rollout.launch.python={PYTHON}", "engine.page_tokens=32", *settings)
    return VllmEngine.launch(context(*launch), ["cpu"] * devices)


class Published:
    """A policy with adapters, what it has published, and an engine that has it."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.version = 0
        self.policy = Adapted("float32", "cpu")
        self.num_bytes: list[int] = []
        self._alone = AdaptersAlone()

    def next(self, mode: UpdateMode | None = None, *, is_repeat: bool = False) -> int:
        """Publish other adapters as the next version."""
        self.version += 1
        self.policy.train(self.version)
        checksums = StreamChecksums(torch.float32)
        update = self._alone.update(self.policy, self.version, checksums, is_repeat)
        self.engine.update_weights(update, mode).result(LIMIT_S)
        self._alone.texts(*checksums.sums())
        self.num_bytes.append(checksums.num_bytes)
        return self.version


@cache
def merged(version: int) -> torch.nn.Module:
    """The learner's model of a version, as transformers computes it."""
    policy = Adapted("float32", "cpu")
    policy.train(version)
    model = load_model(MODEL, dtype="float32", device="cpu", seed=1)
    model.load_state_dict({name: each for bucket in policy.export() for name, each in bucket}, strict=False)
    return model


def ask_again(engine: VllmEngine) -> ModelResponse:
    """The same long prompt every time."""
    request = ModelRequest("long", LONG_PROMPT, PLAIN, rng_key=1)
    return asyncio.run(engine.agenerate(request))


@pytest.fixture(scope="module")
def served() -> Iterator[Published]:
    engine = launched()
    yield Published(engine)
    engine.close()


def test_every_update_of_adapters_gives_the_log_probs_of_the_merged_model(served: Published) -> None:
    engine = served.engine
    assert engine.capabilities.adapters
    for _ in range(4):
        version = served.next()
        for sampling in (PLAIN, SamplingParams(24, temperature=0.0, ignore_end=True)):
            for response in asyncio.run(ask(engine, 4, sampling)):
                assert_sampled_by({version: merged(version), version - 1: merged(version - 1)}, response, sampling)
        # The second time, its pages come from the cache: from that of this version, not of the one before.
        for _ in range(2):
            assert_sampled_by({version: merged(version)}, ask_again(engine), PLAIN)
    assert max(served.num_bytes[1:]) < served.num_bytes[0] / 10, "only the adapters"
    folders = {Path(engine._session.weights.folder), Path(engine._session.weights.adapter_folder)}
    pattern = f"headwater-weights-{os.getpid()}-*"
    kept = {each for each in Path(engine._session.weights.folder).parent.glob(pattern) if each.is_dir()}
    assert kept == folders, "older versions are removed"


def test_responses_that_span_an_update_of_adapters_lose_no_token(served: Published) -> None:
    for mode in ("interrupt", "in_flight", "drain"):
        # On a busy machine, all responses may end before the update, or all requests may arrive after it.
        while not updated_while_generating(served, mode):
            pass


def updated_while_generating(served: Published, mode: UpdateMode) -> bool:
    """Whether a response has tokens of both versions, or for "drain" whether one was generated before the update."""
    sampling = SamplingParams(160, temperature=0.8, ignore_end=True)
    engine, old = served.engine, served.next()
    answers: list[ModelResponse] = []
    thread = threading.Thread(target=lambda: answers.extend(asyncio.run(ask(engine, 6, sampling))))
    thread.start()
    while engine.status().num_running < 6 and thread.is_alive():
        time.sleep(0.02)
    new = served.next(mode)
    thread.join(LIMIT_S)
    assert len(answers) == 6
    for response in answers:
        assert (response.output_len, response.stop_reason) == (160, "length")
        assert list(response.output_versions) == sorted(response.output_versions)
        num_old = response.output_versions.count(old)
        if mode == "in_flight" and 0 < num_old < 160:
            # Its new tokens attend to keys and values of the old adapters.
            assert_continued(merged(old), merged(new), num_old, response, sampling)
        else:
            assert_sampled_by({old: merged(old), new: merged(new)}, response, sampling)
    counts = {response.output_versions.count(old) for response in answers}
    while engine.status().num_running:  # as the server says, which is a moment later
        time.sleep(0.02)
    if mode == "drain":
        assert counts <= {0, 160}
        return 160 in counts
    return bool(counts - {0, 160})


def test_wrong_updates_are_refused(served: Published) -> None:
    version, engine = served.next(), served.engine
    policy = served.policy
    with pytest.raises(WeightsError, match="missing"):
        engine.update_weights(WeightUpdate.of(90, policy.model.named_parameters())).result(LIMIT_S)
    first = next(iter(policy.adapters))
    broken = {**policy.adapters, first: torch.full_like(policy.adapters[first], torch.nan)}
    update = WeightUpdate(91, policy.unmerged_shapes(True), [list(broken.items())], adapters_alone=True)
    with pytest.raises(WeightsError, match="NaN"):
        engine.update_weights(update).result(LIMIT_S)
    for response in asyncio.run(ask(engine, 2, PLAIN)):
        assert_sampled_by({version: merged(version)}, response, PLAIN)


def test_a_second_run_uses_the_same_server(served: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its adapters take the place of those of the run before, on the weights that it sends first."""
    monkeypatch.setenv(SERVER_KEY, served.engine.api_key)
    servers = f"rollout.servers=[{served.engine.url}]"
    with pytest.raises(ConfigError, match=r"rollout\.publish = adapter.*at most rank 8, and lora\.rank = 9.*16"):
        VllmEngine.connect(served.engine.url, context(servers, rank=9))
    second = Published(VllmEngine.connect(served.engine.url, context(servers)))
    try:
        assert second.engine.status().needs_weights
        alone = second.policy
        update = WeightUpdate(7, alone.unmerged_shapes(True), alone.export_unmerged(True), adapters_alone=True)
        with pytest.raises(BaseMissing, match="send all weights"):
            second.engine.update_weights(update).result(LIMIT_S)
        for _ in range(2):
            version = second.next()
            for response in asyncio.run(ask(second.engine, 4, PLAIN)):
                assert_sampled_by({version: merged(version)}, response, PLAIN)
    finally:
        second.engine.close()
    served.next(is_repeat=True)


def test_a_killed_server_gets_the_weights_and_the_newest_adapters(served: Published) -> None:
    engine = served.engine
    served.next()
    version = served.next()
    sampling = SamplingParams(200, ignore_end=True)
    for _ in range(20):
        answers: list[ModelResponse] = []
        thread = threading.Thread(target=lambda: answers.extend(asyncio.run(ask(engine, 6, sampling))))  # noqa: B023
        thread.start()
        while engine.status().num_running < 6 and thread.is_alive():
            time.sleep(0.02)
        os.kill(engine._server.pid, signal.SIGSTOP)
        if still_answers(engine):
            break  # on a busy machine, all may have ended before that is seen
        os.kill(engine._server.pid, signal.SIGCONT)
    os.kill(engine._server.pid, signal.SIGKILL)
    thread.join(LIMIT_S)
    assert engine.status().num_restarts == 1
    assert len(answers) == 6
    for response in answers:
        assert response.output_len == 200
        assert_sampled_by({version: merged(version)}, response, sampling)
    version = served.next()
    for response in asyncio.run(ask(engine, 4, PLAIN)):
        assert_sampled_by({version: merged(version)}, response, PLAIN)


def test_tensor_parallel_workers_take_their_shards_of_the_adapters() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        sharded = Published(launched("rollout.launch.tensor_parallel=2", devices=2))
    try:
        for _ in range(3):
            version = sharded.next()
            for response in asyncio.run(ask(sharded.engine, 4, PLAIN)):
                assert_sampled_by({version: merged(version)}, response, PLAIN)
    finally:
        sharded.engine.close()


def test_a_server_without_adapters_for_a_layer_is_refused() -> None:
    """vLLM would leave out the adapters of the other layers without an error."""
    with pytest.raises(
        ConfigError, match=r"cannot compute adapters of \d+ layers, such as model\.layers.*lora\.targets"
    ):
        launched("rollout.launch.args=[--lora-target-modules, q_proj]").close()


def test_vllm_computes_adapters_in_this_process() -> None:
    script = Path(__file__).with_name("vllm_in_process.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [PYTHON, script, "adapters"], env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT_S,
        check=False,
    )  # fmt: skip
    if "NO PACKAGE" in done.stdout:
        pytest.skip(f"{PYTHON} lacks a package of Headwater: {done.stdout.strip()[-200:]}")
    assert done.stdout.strip().endswith("all is well"), done.stdout[-2000:] + done.stderr[-2000:]


def test_a_run_learns_and_publishes_adapters_alone(tmp_path: Path) -> None:
    settings = ["rollout.backend=vllm", "rollout.placement=disaggregated", f"rollout.launch.python={PYTHON}"]
    settings += ["rollout.publish=adapter", "trainer.total_steps=20", "eval.before=false", "eval.after=false"]
    train_here("quickstart-lora", *settings, "rollout.max_staleness=1", f"run.root={tmp_path}")
    run = tmp_path / "quickstart-lora"
    records = metrics(run, "train")
    rewards = [each["reward/mean"] for each in records]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    fresh = [each["rollout_gap/logprob_abs_mean"] for each in records if not each.get("staleness/lag_1")]
    assert max(fresh) < TOLERANCE, "tokens of the newest version have the log-probs of the learner's weights"
    assert max(each["weights/bytes"] for each in records) < 1e6, "only the adapters, of a model of 3.4 MB"
    assert len({each["weights"] for each in RunDirectory.open(run).read_ledger() if each["kind"] == "step"}) == 20
