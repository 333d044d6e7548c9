"""Weights straight from two ranks to two engines, each in its own process; some are killed or stopped midway."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import closing

import forked
import pytest
from integration import collective_ranks
from integration.command import PROCESS_LIMIT_S

from headwater.backends.native.engine import NativeEngine
from headwater.backends.native.places import ForeignServer
from headwater.observe.spans import Spans
from headwater.weights.publish import publish

pytestmark = pytest.mark.slow

NUM_BYTES = 3413504
"""All weights of the model, in float32."""


def test_two_ranks_send_to_two_engines_and_survive_one_that_dies_or_stops(tmp_path):
    done = forked.run(collective_ranks.__file__, tmp_path, timeout=PROCESS_LIMIT_S)
    assert (tmp_path / "outcomes.json").exists(), done.stderr[-3000:]
    seen = json.loads((tmp_path / "outcomes.json").read_text())
    assert set(seen["parts"]) == {3}, "both ranks send a part of every tensor"
    for version, name in ((1, "first"), (2, "second")):
        outcome = seen[name]
        assert outcome["is_exported"], "the checksum of the ranks' parts is that of the whole weights"
        assert outcome["is_served"] == [True, True]
        assert outcome["versions"] == [version, version]
        assert outcome["num_bytes"] == NUM_BYTES
        assert outcome["has_pause"]
    assert seen["is_reused"]
    assert (seen["killed"]["is_served"], seen["killed"]["version"]) == (True, 3)
    assert seen["replaced"] == {"versions": [3, 3], "num_checksums": 1}
    assert seen["stopped"]["is_served"]
    assert seen["continued"] == {"versions": [4, 4], "num_checksums": 1}
    plain, again = seen["adapters, delta"]
    assert plain["is_served"] == again["is_served"] == [True]
    assert plain["is_exported"], "merged adapters"
    assert again["num_bytes"] < NUM_BYTES / 100, "nothing has changed"
    alone = seen["adapters alone"]
    updates = [alone[each] for each in ("1", "2", "3", "5")]
    assert all(each["is_exported"] and each["is_served"] == [True, True] for each in updates)
    assert len({each["checksum"] for each in updates}) == 4, "each has other values"
    sizes = [each["num_bytes"] for each in updates]
    assert sizes[0] == NUM_BYTES + sizes[1], "the weights came once, without being gathered"
    assert max(sizes[1:]) < NUM_BYTES / 10
    assert alone["killed"]["is_served"]
    assert alone["replaced"] == {"versions": [4, 4], "num_checksums": 1}, "it got the weights below them again"
    for version, num_bytes in (("6", sizes[0]), ("7", sizes[1])):
        assert alone[f"streamed {version}"] == {"is_served": True, "num_bytes": num_bytes}
    # Far below the limit of an engine call, which is an hour.
    assert max(seen["killed"]["seconds"], seen["stopped"]["seconds"]) < 600


def test_a_server_outlives_a_learner_that_is_killed_while_it_sends(tmp_path):
    arguments = [sys.executable, "-m", "headwater", "serve", collective_ranks.MODEL, "--port", "0", "--until-eof"]
    arguments += ["--dtype", "float32", "--device", "cpu", "engine.kv_cache_gib=0.02"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        url = next(line.split(" at ")[1].strip() for line in server.stdout if line.startswith("serving"))
        killed = subprocess.run(
            [sys.executable, collective_ranks.__file__, tmp_path, url], timeout=PROCESS_LIMIT_S, check=False
        )
        assert killed.returncode == -signal.SIGKILL
        engine = NativeEngine(ForeignServer(url), transfer="collective", spans=Spans())
        with closing(engine):
            started = time.monotonic()
            published = publish(collective_ranks.OneRank(2), engine, 8)
            assert time.monotonic() - started < 600
            assert engine.weights_checksum() == published.serving
            assert engine.get_version() == 8
        server.stdin.close()
        assert server.wait(PROCESS_LIMIT_S) == 0
