"""A reward that differs between the samples of a group, so that every step really updates an untrained model."""

from __future__ import annotations

import hashlib


def compute_score(data_source, solution_str, ground_truth, extra_info) -> float:
    return hashlib.blake2b(solution_str.encode(), digest_size=1).digest()[0] / 255
