"""Makes torchvision importable beside a torch for CPUs. ``make setup-vllm`` and ``make setup-sglang`` run it in
their environments.

vLLM and SGLang scale images with torchvision, whose wheels are linked with CUDA. A torch without CUDA cannot load their
compiled part. torchvision itself continues without it, but its import fails because the fake versions of two operators,
which filter boxes of detected objects, are registered although the operators do not exist. This declares them. Scaling
and normalising images is Python code that calls torch, and uses nothing of the compiled part.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

DECLARATION = """

if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> int:
    if can_be_imported():
        return 0
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return 1
    file = Path(spec.origin).with_name("extension.py")
    content = file.read_text(encoding="utf-8")
    if DECLARATION not in content:
        file.unlink()  # installers may link it with their cache
        file.write_text(content + DECLARATION, encoding="utf-8")
    return 0 if can_be_imported() else 1


def can_be_imported() -> bool:
    code = "import torchvision, torchvision.transforms.v2, transformers; transformers.PreTrainedModel"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
