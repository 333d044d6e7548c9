"""The kernels for few rows are compiled for compute capability 9.0, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from engine.kernels.support import triton

SHARED_BYTES = 227 * 1024
SCRIPT = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from headwater.engine.kernels.skinny_pairs import _normed_gate_up, _normed_qkv, pair_config
from headwater.engine.kernels.skinny_sums import _add_product, sum_config

TYPES = {"num_rows": "i32", "eps": "fp32", "scaled": "*fp32", "squares": "*fp32", "residual": "*fp32", "parts": "*fp32",
         "cos": "*fp32", "sin": "*fp32", "positions": "*i32", "slots": "*i64", "arrived": "*i32"}

def compiled(kernel, config, dependent=False, **values):
    values |= {"DEPENDENT": dependent}
    values |= {"BLOCK_M": 16, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.num_stages}
    values |= {"PRECISION": "tf32"}
    types, names = {}, kernel.arg_names
    for name in names:
        default = "i32" if name.endswith("stride") else "*bf16"
        types[name] = "constexpr" if name in values else TYPES.get(name, default)
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if types[name].startswith("*")}
    source = ASTSource(kernel, types, values, aligned)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": config.num_warps})
    copies, waits = (made.asm["ptx"].count(each) for each in ("cp.async.cg", "griddepcontrol.wait"))
    assert waits == dependent, (kernel, waits)
    print(json.dumps({"shared": made.metadata.shared, "copies": copies, "bytes": len(made.asm["cubin"])}))

for hidden, heads, kv_heads, head_dim, size, bias in ((1536, 12, 2, 128, 8960, True), (576, 9, 3, 64, 1536, False)):
    norm = {"SIZE": hidden, "SQUARES": 18, "SQUARES_PAD": 32}
    outputs = (heads + 2 * kv_heads) * head_dim
    compiled(_normed_gate_up, pair_config(2 * size), bias, **norm, NUM_PAIRS=size, HAS_BIAS=False)
    compiled(_normed_qkv, pair_config(outputs), **norm, NUM_HEADS=heads, NUM_KV_HEADS=kv_heads, HALF=head_dim // 2,
             PAGE=64, ROTATE=bias, HAS_BIAS=bias)
    for inputs in (heads * head_dim, size):
        config = sum_config(hidden, inputs)
        compiled(_add_product, config, bias, OUTPUTS=hidden, INPUTS=inputs, SLICES=config.slices, SLICE=512,
                 HAS_BIAS=False)
"""


@pytest.mark.slow
@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton has no compiler for CUDA")
def test_kernels_compile_and_copy_weights_ahead():
    # In a new process, because these tests run in Triton's interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 8
    for each in made:
        assert each["bytes"] > 0
        assert each["copies"] > 0, "the loads of the loop are not asynchronous"
        assert 0 < each["shared"] <= SHARED_BYTES // 2, "two programs no longer fit on a multiprocessor"
