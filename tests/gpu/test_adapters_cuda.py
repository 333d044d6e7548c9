"""Adapters beside the weights of an engine on a GPU, under CUDA graphs, and checksums on a stream of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engine"))

from adapters import RANK, Adapted, compared, engine

from headwater.core.errors import ConfigError
from headwater.models.checksum import checksum
from headwater.weights.publish import publish


def test_log_probs_are_those_of_merged_weights():
    for dtype, largest_allowed, mean_allowed in (("float32", 1e-2, 1e-3), ("bfloat16", 0.5, 0.05)):
        ratio, largest, mean = compared(dtype, "cuda")
        assert ratio < 0.1
        assert largest < largest_allowed
        assert 0 < mean < mean_allowed


def test_a_deterministic_engine_has_no_adapters():
    with pytest.raises(ConfigError, match=r"rollout\.publish=full"):
        engine("bfloat16", "cuda", RANK, deterministic=True)


def test_checksums_beside_the_stream_are_those_of_the_weights():
    policy, served = Adapted("float32", "cuda"), engine("bfloat16", "cuda")
    try:
        for version in range(1, 6):
            policy.train(version)
            published = publish(policy, served, version)
            exported = [each for bucket in policy.export() for each in bucket]
            assert published.serving == checksum(exported, torch.bfloat16) == served.weights_checksum()
            assert published.trained == checksum(exported)
    finally:
        served.close()
