"""The kernels of training are compiled for compute capability 9.0, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from engine.kernels.support import triton

SCRIPT = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from headwater.learner import joined_kernels, logit_kernels, norm_kernels

FLOATS = {"logits", "logprobs", "entropies", "squares", "normalizers", "logprob_gradients", "entropy_gradients", "cos",
          "sin", "residual", "total", "inverse_rms", "total_gradient", "residual_gradient", "weight_parts"}
TYPES = {"temperature": "fp32", "eps": "fp32", "targets": "*i64", "num_rows": "i32", "rows_per_program": "i32"}
TYPES |= dict.fromkeys(FLOATS, "*fp32")

def compiled(kernel, num_warps, **values):
    names = kernel.arg_names
    types = {name: "constexpr" if name in values else TYPES.get(name, "*bf16") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if types[name].startswith("*")}
    made = compile(ASTSource(kernel, types, values, aligned), target=GPUTarget("cuda", 90, 32),
                   options={"num_warps": num_warps})
    ptx = made.asm["ptx"]
    wide = [each for each in ("ld.global.v4", "ld.global.L1", "cp.async.cg", "v2.b64", "v4.b32") if each in ptx]
    print(json.dumps({"name": kernel.__name__, "bytes": len(made.asm["cubin"]), "shared": made.metadata.shared,
                      "copies": ptx.count("cp.async"), "wide": wide}))

rows = {"SIZE": 151936}
compiled(logit_kernels._summarise, logit_kernels._WARPS, BLOCK=logit_kernels._BLOCK, **rows)
compiled(logit_kernels._differentiate, logit_kernels._WARPS, BLOCK=logit_kernels._GRADIENT_BLOCK, **rows)
for kernel in (joined_kernels._gate, joined_kernels._gate_backward):
    compiled(kernel, joined_kernels._WARPS, SIZE=8960, BLOCK=joined_kernels._BLOCK)
for is_backward in (False, True):
    compiled(joined_kernels._rotate, joined_kernels._WARPS, HEADS=12, KV_HEADS=2, HALF=64, HEADS_PAD=16, HALF_PAD=64,
             IS_BACKWARD=is_backward)
norm = {"SIZE": 1536, "BLOCK": 2048, "HAS_PRODUCT": True}
compiled(norm_kernels._forward, 8, **norm)
compiled(norm_kernels._backward, 8, **norm, HAS_TOTAL=True)
"""


@pytest.mark.slow
@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton has no compiler for CUDA")
def test_kernels_compile_and_read_whole_words():
    # In a new process, because these tests run in Triton's interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 8
    assert all(each["bytes"] > 0 and each["wide"] for each in made), made
    assert made[0]["copies"] > 0, "the logits of the next block are not read ahead"
