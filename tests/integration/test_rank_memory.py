"""No rank ever holds a whole model: the memory of four ranks while they load, train, publish, save and resume.

Runs save in the background (``snapshot``), and with ``save`` if there is too little memory for a copy.

``publish`` gathers every tensor for an engine in the process of the first rank, and ``broadcast`` sends every rank's
parts to an engine elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from integration import four_ranks
from integration.command import ROOT
from transformers import AutoModelForCausalLM

from headwater.models.builtin.tiny import Preset, build_config
from headwater.models.load import load_model, load_tokenizer, save_model

MIB = 2**20
LIMIT_S = 600.0
SHAPE = Preset("qwen2", hidden_size=640, intermediate_size=2560, num_layers=8, num_heads=8, num_kv_heads=8, head_dim=80)
SLACK = 32 * MIB
"""For what is not weights: buffers of gloo, Python objects, pages of files that were read."""


@pytest.mark.slow
def test_no_rank_ever_holds_a_whole_model(tmp_path):
    tokenizer = load_tokenizer("tiny:qwen2")
    model = AutoModelForCausalLM.from_config(build_config(SHAPE))
    whole = sum(each.nbytes for each in model.parameters())
    layer = sum(each.nbytes for each in model.model.layers[0].parameters())
    save_model(model, tokenizer, tmp_path / "model")
    save_model(load_model("tiny:qwen2", dtype="float32", device="cpu", seed=0), tokenizer, tmp_path / "small")
    del model
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", four_ranks.__file__,
        str(tmp_path),
    ]  # fmt: skip
    # Freed memory goes back to the system at once, so that the peak is what was in use.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests",
                   "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = json.loads((tmp_path / "results.json").read_text())
    saved, *snapshots = (
        [path.read_bytes() for path in sorted((tmp_path / "of_model" / name / "model").glob("*.safetensors"))]
        for name in (".", "snapshot", "snapshot_again")
    )
    assert saved
    assert snapshots == [saved, saved]
    shard = whole / four_ranks.NUM_RANKS
    assert max(peaks["held"]) <= shard + MIB
    bucket = four_ranks.BUCKET_BYTES
    most = {
        # Gradients; the layer in use, the next one, and the gradients of two that are being summed.
        "update_again": shard + 4 * layer + SLACK,
        # The bucket before, the present one, and a tensor of the next one that is gathered. On a busy machine, a thread
        # of gloo may hold another tensor for a moment.
        "publish": 3 * bucket + SLACK,
        "broadcast": 2 * bucket + SLACK,  # two buffers with this rank's parts, and one tensor that is not split
        # The memory of the first copy is used again. The first rank puts the model together: pages of the files that
        # it reads, the last tensor of them, and its whole.
        "snapshot_again": 3 * bucket + SLACK,
        "save": 2 * bucket + SLACK,  # one gathered tensor at a time, and nothing of the shards is copied
        # Pages of files that are read do not count in these: the system reads them in larger pieces than asked for.
        "start, anonymous": shard + 2 * bucket + SLACK,
        "load, anonymous": 4 * bucket + SLACK,
    }
    assert max(most.values()) < whole  # or they prove nothing
    # The first update also makes AdamW's averages, and the first copy in the background has the shard and these. Both
    # stay, so that only the second update and the second copy show what was needed for a moment.
    most["update"] = 3 * shard + 3 * layer + SLACK
    most["snapshot, anonymous"] = 3 * shard + 4 * bucket + SLACK
    shown = {name: [round(each / MIB) for each in values] for name, values in peaks.items()}
    for name, limit in most.items():
        assert max(peaks[name]) <= limit, f"{name}: {shown[name]} MiB, at most {limit / MIB:.0f}; {shown}"
