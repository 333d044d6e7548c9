"""``python -m headwater``, which is also what torchrun starts: ``torchrun -m headwater train RECIPE``."""

from __future__ import annotations

import sys

from headwater.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
