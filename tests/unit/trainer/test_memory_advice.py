"""What an error about memory advises can be done: in the run, or in a new one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwater.config.checks import fits_checkpoint
from headwater.config.load import load_config
from headwater.config.schema import Config
from headwater.core.errors import ConfigError
from headwater.trainer import memory_advice
from headwater.trainer.memory_advice import NEW_RUN, Known, remedies

STAGES = ("wait", "experience", "train", "publish", "offload", "checkpoint", "evaluate", "warm_start", "load_engine",
          "load_learner", "resume")  # fmt: skip
PPO = ["algorithm.advantage=gae", "critic.enabled=true"]


def advice(*settings: str, known: Known | None = None) -> dict[str, list[str]]:
    config = load_config(None, settings).config
    return {stage: list(remedies(stage, config, 10**9, 50_000, known)) for stage in STAGES}


def resumes(before: Config, given: list[str], line: str) -> bool:
    """Whether a resume of the run takes all settings that the line names."""
    named = [each.replace("SMALLER_MODEL", "tiny:llama") for each in re.findall(r"[a-z_]+\.[a-z_]+=[^\s,:;]+", line)]
    try:
        load_config(None, [*given, *named], [fits_checkpoint(before, Path("step_000001"))])
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_is_advised_is_possible(on_gpu, monkeypatch):
    monkeypatch.setattr(memory_advice, "_uses_gpu", lambda *_: on_gpu)
    for given in ([], PPO, ["rollout.max_staleness=2"], ["engine.kv_cache_gib=3"]):
        before = load_config(None, given).config
        lines = [line for of_stage in advice(*given).values() for line in of_stage]
        assert len(lines) > 6
        for line in lines:
            assert resumes(before, given, line) == (NEW_RUN not in line), line
        assert on_gpu == any("learner.offload_optimizer" in line for line in lines), "it has no effect on a CPU"
    assert any(NEW_RUN in line and "critic.path" in line for line in advice(*PPO)["train"])


def test_what_is_advised_for_pictures_is_possible():
    given = ["model.path=tiny:qwen2_5_vl"]
    before = load_config(None, given).config
    lines = advice(*given, known=Known.of(before))["train"]
    of_pictures = [line for line in lines if "max_image_pixels" in line or "freeze" in line]
    assert len(of_pictures) == 2
    for line in of_pictures:
        assert resumes(before, given, line) == (NEW_RUN not in line), line


def test_the_present_values_are_those_that_the_engine_uses(monkeypatch):
    on_cpu = advice("model.device=cpu")["wait"]
    assert any("engine.max_sequences=128 (now 256)" in line for line in on_cpu)
    assert any("engine.max_prefill_tokens=512 (now 1024)" in line for line in on_cpu)
    assert any("engine.memory_fraction=0.2 (now 0.4" in line for line in on_cpu)
    monkeypatch.setattr(memory_advice, "_uses_gpu", lambda *_: True)
    assert any("engine.max_sequences=512 (now 1024)" in line for line in advice()["wait"])
    assert any(
        "engine.memory_fraction=0.425 (now 0.85" in line for line in advice("rollout.placement=disaggregated")["wait"]
    )
    for lines in (advice("engine.kv_cache_gib=3")[stage] for stage in ("wait", "train")):
        assert any("engine.kv_cache_gib=1.5 (now 3)" in line for line in lines)
        assert not any("memory_fraction" in line for line in lines), "it is not read"
