"""Count the source files in which one training step executes a function.

    python benchmarks/files_per_step.py

Trains the quickstart's model for three steps under a profiler and counts the files of the second step, on all threads.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from options import parser_of
from record import write_record

import headwater
from headwater.cli.main import main as headwater_main

SOURCE = Path(headwater.__file__).parent
LOOP = str(SOURCE / "trainer" / "loop.py")
OVERRIDES = (
    "warm_start.num_steps=0",
    "trainer.total_steps=3",
    "trainer.checkpoint_every_steps=0",
    "learner.skip_zero_advantages=false",  # an untrained model may score alike everywhere
    "eval.before=false",
    "eval.after=false",
    "eval.every_steps=0",
)


class StepProfile:
    """Notes files from the second call of ``Trainer._take`` to the return of the ``Trainer._record`` after it."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._num_steps = 0
        self._is_on = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_filename == LOOP:
            if event == "call" and code.co_name == "_take":
                self._num_steps += 1
                self._is_on = self._num_steps == 2
            elif event == "return" and code.co_name == "_record":
                self._is_on = False
        if self._is_on and event == "call" and code.co_filename.startswith(str(SOURCE)):
            self.files.add(str(Path(code.co_filename).relative_to(SOURCE)))


def profiled_step(recipe: str) -> set[str]:
    profile = StepProfile()
    with tempfile.TemporaryDirectory() as root:
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            code = headwater_main(["train", recipe, f"run.root={root}", *OVERRIDES])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    if code:
        raise SystemExit(f"training ended with exit status {code}")
    return profile.files


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="quickstart")
    options = parser.parse_args()
    files = profiled_step(options.recipe)
    all_files = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")]
    per_folder = Counter(name.partition("/")[0] for name in files)
    for name in sorted(files):
        print(name)
    print(f"\n{len(files)} of {len(all_files)} files: {dict(sorted(per_folder.items()))}")
    write_record(
        options.out,
        torch.device("cpu"),
        files_per_step=len(files),
        source_files=len(all_files),
        files=sorted(files),
    )


if __name__ == "__main__":
    main()
