"""Command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path

from shapes import SHAPES


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser for a script with this docstring, with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    return parser


def add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="shape of the model; its weights are random")


def add_work(
    parser: argparse.ArgumentParser,
    *,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    samples: int | None = None,
    runs: int | None = None,
) -> None:
    """How much is generated and how often; only the options that are given a default."""
    defaults = {
        "--prompt-tokens": (prompt_tokens, "length of each prompt"),
        "--new-tokens": (new_tokens, "length of each response"),
        "--samples": (samples, "samples per prompt"),
        "--runs": (runs, "timed runs"),
    }
    for name, (default, meaning) in defaults.items():
        if default is not None:
            parser.add_argument(name, type=int, default=default, help=f"{meaning} (default {default})")
