"""Tests that need a CUDA device."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
