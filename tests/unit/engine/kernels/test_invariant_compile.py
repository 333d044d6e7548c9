"""The products of deterministic mode are compiled for compute capability 9.0, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from engine.kernels.support import ON_CUDA, triton

SHARED_BYTES = 227 * 1024
SCRIPT = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from headwater.engine.kernels.gated_linear import _gated_linear
from headwater.engine.kernels.linear import _SCALED_TILES, _TOGETHER_TILES, _linear

def compiled(name, kernel, config, outputs, **values):
    values |= {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "STAGES": config.num_stages, "PRECISION": "tf32"}
    types, names = {}, kernel.arg_names
    types["x"] = f"tensordesc<bf16[{config.block_m},{config.block_k}]>"
    types["weight"] = f"tensordesc<bf16[{outputs},{config.block_k}]>"
    for each in names:
        default = "i32" if each.endswith("stride") or each.startswith("num_") else "*bf16"
        types[each] = "constexpr" if each in values else types.get(each, default)
    types = {each: types[each] for each in names}
    aligned = {(names.index(each),): [["tt.divisibility", 16]] for each in names if types[each].startswith("*")}
    source = ASTSource(kernel, types, values, aligned)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": config.num_warps})
    ptx = made.asm["ptx"]
    print(json.dumps({"name": name, "shared": made.metadata.shared, "waits": ptx.count("wgmma.wait_group"),
                      "products": ptx.count("wgmma.mma_async"), "loads": ptx.count("cp.async.bulk.tensor")}))

for _, config in _SCALED_TILES:
    compiled("gated", _gated_linear, config, config.block_n // 2, BLOCK_P=config.block_n // 2,
             HAS_BIAS=False)
for config, slices, together in ((_SCALED_TILES[0][1], 1, False), (_SCALED_TILES[2][1], 4, False),
                                 (_TOGETHER_TILES, 4, True)):
    compiled("linear", _linear, config, config.block_n, BLOCK_N=config.block_n, HAS_BIAS=False, SLICES=slices,
             TOGETHER=together)
"""


@pytest.mark.slow
@pytest.mark.skipif(ON_CUDA, reason="tests/gpu compiles and runs them")
@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton has no compiler for CUDA")
def test_kernels_compile_to_asynchronous_products():
    # In a new process, because these tests run in Triton's interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 7
    for each in made:
        assert each["loads"] > 0, f"{each}: operands are not read through descriptors"
        assert each["products"] > 0, f"{each}: no warp-group products"
        assert 0 < each["shared"] <= SHARED_BYTES, each
