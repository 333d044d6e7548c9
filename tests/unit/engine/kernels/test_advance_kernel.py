"""Advancing a decode batch by one token."""

from __future__ import annotations

import torch
from engine.kernels.support import DEVICE

from headwater.engine.kernels.advance import advance
from headwater.engine.plans import MAX_STOP_IDS

PAGE = 16


def state(rows: int, steps: int = 3) -> dict[str, torch.Tensor]:
    def full(value: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape or (rows,), value, dtype=dtype, device=DEVICE)

    return {
        "last_tokens": full(1, torch.int64),
        "positions": full(14, torch.int64),
        "context_lens": full(15, torch.int32),
        "num_generated": full(0, torch.int32),
        "max_new": full(3, torch.int32),
        "min_new": full(0, torch.int32),
        "stop_ids": full(-1, torch.int64, rows, MAX_STOP_IDS),
        "alive": full(1, torch.bool),
        "slots": full(99, torch.int64),
        "page_table": (torch.arange(2 * rows, dtype=torch.int32, device=DEVICE) + 1).view(rows, 2),
        "out_tokens": full(77, torch.int32, steps, rows),
        "out_logprobs": full(5, torch.float32, steps, rows),
        "step_index": full(0, torch.int32, 1),
    }


def step(batch: dict[str, torch.Tensor], tokens: list[int]) -> None:
    sampled = torch.tensor(tokens, device=DEVICE)
    advance(sampled, -sampled.float(), page_tokens=PAGE, **batch)


def test_a_batch_over_three_steps():
    batch = state(rows=4)
    batch["alive"][3] = False
    batch["stop_ids"][0, 1] = 40
    batch["stop_ids"][1, 0] = 40
    batch["min_new"][1] = 1

    step(batch, [10, 40, 12, 13])
    assert batch["alive"].tolist() == [True, True, True, False]
    assert batch["slots"].tolist() == [1 * PAGE + 15, 3 * PAGE + 15, 5 * PAGE + 15, 0]
    step(batch, [40, 40, 22, 23])
    assert batch["alive"].tolist() == [False, False, True, False]
    assert batch["slots"].tolist() == [0, 0, 6 * PAGE, 0], "position 16 is the second page's first"
    step(batch, [30, 31, 32, 33])
    assert batch["alive"].tolist() == [False] * 4, "row 2 reached max_new"
    assert batch["slots"].tolist() == [0] * 4

    assert batch["out_tokens"].tolist() == [[10, 40, 12, -1], [40, 40, 22, -1], [-1, -1, 32, -1]]
    assert batch["out_logprobs"].tolist() == [[-10, -40, -12, 0], [-40, -40, -22, 0], [0, 0, -32, 0]]
    assert batch["last_tokens"].tolist() == [40, 40, 32, 1]
    assert batch["num_generated"].tolist() == [2, 2, 3, 0]
    assert batch["positions"].tolist() == [16, 16, 17, 14]
    assert batch["context_lens"].tolist() == [0, 0, 0, 15], "attention reads nothing for a row that has ended"
    assert batch["step_index"].item() == 3


def test_steps_beyond_the_record_are_not_written():
    batch = state(rows=2, steps=1)
    batch["max_new"][:] = 9
    step(batch, [5, 6])
    step(batch, [7, 8])
    assert batch["out_tokens"].tolist() == [[5, 6]]
    assert batch["last_tokens"].tolist() == [7, 8]


def test_more_rows_than_one_block():
    rows = 700
    batch = state(rows)
    step(batch, list(range(rows)))
    assert batch["out_tokens"][0].tolist() == list(range(rows))
    assert batch["slots"].tolist() == [(2 * row + 1) * PAGE + 15 for row in range(rows)]


def test_a_row_without_a_further_page_writes_to_scratch():
    batch = state(rows=1)
    batch["positions"][0] = 31
    step(batch, [5])
    assert batch["slots"].tolist() == [0]


def test_a_stop_counts_only_beyond_the_least_number_of_tokens():
    batch = state(rows=2)
    batch["stop_ids"][:, 0] = 40
    batch["min_new"][:] = torch.tensor([0, 1], dtype=torch.int32)
    step(batch, [40, 40])
    assert batch["alive"].tolist() == [False, True]
    assert batch["context_lens"].tolist() == [0, 16]


def test_the_record_may_be_part_of_a_wider_one():
    batch = state(rows=2)
    wide_tokens, wide_logprobs = torch.zeros(3, 5, dtype=torch.int32), torch.zeros(3, 5)
    batch["out_tokens"], batch["out_logprobs"] = wide_tokens.to(DEVICE)[:, :2], wide_logprobs.to(DEVICE)[:, :2]
    step(batch, [5, 6])
    step(batch, [7, 8])
    assert batch["out_tokens"].tolist() == [[5, 6], [7, 8], [0, 0]]
    assert batch["out_logprobs"].tolist() == [[-5, -6], [-7, -8], [0, 0]]
