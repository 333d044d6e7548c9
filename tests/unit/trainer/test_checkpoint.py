"""The weights of a checkpoint against the ledger."""

from __future__ import annotations

import pytest
from log import own_records

from headwater.core.errors import DamagedCheckpoint
from headwater.observe.run_directory import RunDirectory
from headwater.trainer.checkpoint import check_weights


def test_every_part_is_compared_and_only_rounding_of_merged_adapters_is_allowed(tmp_path, caplog):
    run = RunDirectory(tmp_path)
    recorded = {
        1: "float32-a",
        2: "float32-a critic float32-c",
        3: "float32-a adapters float32-b critic float32-c",
    }
    lines = (f'{{"kind": "step", "step": {step}, "weights": "{text}"}}\n' for step, text in recorded.items())
    run.ledger_file.write_text("".join(lines))
    for step, text in recorded.items():
        check_weights(run, step, text)
        for part in ("float32-a", "float32-b", "float32-c"):
            changed = text.replace(part, "float32-other")
            if changed == text or (step == 3 and part == "float32-a"):
                continue
            with pytest.raises(DamagedCheckpoint, match=rf"step_00000{step}: its weights are not those that step"):
                check_weights(run, step, changed)
    assert not own_records(caplog)
    check_weights(run, 3, recorded[3].replace("float32-a", "float32-other"))
    assert "merged into the model they give other weights" in caplog.text
    check_weights(run, 4, "float32-of a step that the ledger does not have")
