"""How free memory is measured, and what happens when there is too little."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from cases import case
from engine.engine_parts import assert_same, make_model, request, running, tokens_of
from tiny import tokenizer

from headwater.config.schema import EngineConfig
from headwater.core.errors import ConfigError, MemoryRefused
from headwater.engine import kv_cache
from headwater.engine.engine import Engine
from headwater.engine.kv_cache import available_ram

GIB = 2**30


def machine(root, files):
    for name, text in {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {16 * 2**20} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder, limit, used, cached=0):
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_file {cached}\n",
    }


def group_of_version_1(folder, limit, used, cached=0):
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"inactive_file 5\ntotal_inactive_file {cached}\n",
    }


CASES = {
    "no groups": ({}, 16 * GIB),
    "no limit": ({"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", "max", GIB)}, 16 * GIB),
    "version 2": (
        {"proc/self/cgroup": "0::/job/step\n", **group("sys/fs/cgroup/job/step", 6 * GIB, 3 * GIB, GIB)},
        4 * GIB,
    ),
    "version 2, limit above": (
        {
            "proc/self/cgroup": "0::/job/step\n",
            **group("sys/fs/cgroup/job/step", "max", GIB),
            **group("sys/fs/cgroup/job", 8 * GIB, 3 * GIB),
        },
        5 * GIB,
    ),
    "version 2, in a container": (
        {"proc/self/cgroup": "0::/docker/0123\n", **group("sys/fs/cgroup", 3 * GIB, GIB)},
        2 * GIB,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n",
            **group_of_version_1("sys/fs/cgroup/memory/job", 4 * GIB, 3 * GIB, GIB),
            **group_of_version_1("sys/fs/cgroup/memory", 2**63 - 4096, 3 * GIB),
        },
        2 * GIB,
    ),
    "more room than the machine has": (
        {"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", 99 * GIB, GIB)},
        16 * GIB,
    ),
    "used up": ({"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", GIB, 2 * GIB)}, 0),
}


def test_memory_is_what_the_machine_has_left_or_the_group_of_the_process(tmp_path):
    for name in CASES:
        with case(name):
            files, expected = CASES[name]
            assert available_ram(machine(tmp_path / name, files)) == expected


def test_a_machine_that_does_not_tell_is_taken_for_a_laptop(tmp_path):
    assert available_ram(tmp_path) == 8 * GIB


def test_a_cache_that_does_not_fit_is_refused_by_the_setting_that_decided(monkeypatch):
    for settings, named in [({}, 0.4), ({"memory_fraction": 0.2}, 0.2)]:
        with case(settings, named):
            monkeypatch.setattr(kv_cache, "free_bytes", lambda _: 1000)
            with pytest.raises(ConfigError) as caught:
                Engine(make_model(), tokenizer(), EngineConfig(**settings))
            assert f"engine.memory_fraction = {named} of" in str(caught.value)
            assert "kv_cache_gib" not in str(caught.value)


def test_an_engine_that_finds_no_memory_to_wake_up_says_what_it_needs_and_can_be_woken_later():
    for error in [torch.OutOfMemoryError, MemoryError]:
        with case(error):
            asked = request(tokens_of(9))
            with running() as engine:
                expected = engine.generate([asked])
                engine.sleep()
                allocate = engine._runner.cache.allocate_again
                engine._runner.cache.allocate_again = Mock(side_effect=error("no"))
                needed = r"kv_cache needs [\d.]+ GiB, but only [\d.]+ GiB are free on cpu.*stays asleep"
                with pytest.raises(MemoryRefused, match=needed):
                    engine.wake(["weights", "kv_cache"])
                assert engine.is_alive
                assert engine.metrics().is_asleep
                assert not engine._memory.is_asleep("weights"), "what came back before is back"
                assert engine._memory.is_asleep("kv_cache")
                engine._runner.cache.allocate_again = allocate
                engine.wake()
                assert_same(engine.generate([asked]), expected)
