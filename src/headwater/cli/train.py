"""``headwater train``: start a run from a recipe, or resume a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from headwater.api import launch
from headwater.cli.process import EXIT_INTERRUPTED
from headwater.core.errors import HeadwaterError

HELP = "Train a model from a recipe, or resume a run. Ctrl-C stops after the current update and saves a checkpoint."
EXAMPLES = """\
examples:
  headwater train quickstart                               a built-in recipe
  headwater train quickstart dapo run.name=dapo            with the settings of an algorithm
  headwater train my.yaml trainer.total_steps=20           your own recipe, with one setting changed
  headwater train --resume runs/quickstart                 continue a run, from any folder
  torchrun --nproc-per-node 4 -m headwater train my.yaml   on several GPUs
  headwater train my.yaml cluster=ray cluster.learner.num_ranks=4   on a Ray cluster

Relative paths in a recipe and on the command line start at the working directory. `headwater config RECIPE` shows every
setting."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "headwater train RECIPE [RECIPE ...] [key=value ...]\n"
        "       headwater train --resume RUN [--step N] [key=value ...]"
    )
    parser.epilog = EXAMPLES
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="RECIPE, key=value",
        help="built-in recipes (`headwater recipes` lists them) or YAML files, merged in order, and settings that "
        "override them",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="resume this run directory, or the URL of its copy (trainer.checkpoint_dir); no recipe is given",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="with --resume: the checkpoint to resume from; default: the latest"
    )


def run(args: argparse.Namespace) -> int:
    if launch.is_helper():
        launch.serve_rank()
        return 0
    from headwater.config.builtin import split_arguments
    from headwater.config.extension_checks import START_CHECKS
    from headwater.config.load import load_config

    recipes, overrides = split_arguments(args.arguments)
    if args.resume is not None:
        if recipes:
            raise HeadwaterError(
                f"--resume {args.resume} with the recipe {recipes[0]}: a resumed run uses its own recipe; give "
                "either a recipe or --resume, and settings to change as key=value"
            )
        _say_that_it_starts([args.resume])
        ended = launch.resume(args.resume, args.step, overrides)
    elif args.step is not None:
        raise HeadwaterError("--step goes with --resume RUN")
    else:
        _check_complete(recipes)
        loaded = load_config(recipes, overrides, START_CHECKS)
        _say_that_it_starts(recipes)
        ended = launch.start(loaded.config, loaded.given)
    return 0 if ended.is_finished else EXIT_INTERRUPTED


def _say_that_it_starts(names: Sequence[str]) -> None:
    """Importing torch and transformers takes seconds on a fast machine, and more on a slow one."""
    if sys.stdout.isatty():
        print(f"Starting {' '.join(names)}: loading PyTorch", flush=True)


def _check_complete(recipes: Sequence[str]) -> None:
    from headwater.config.builtin import find_builtin

    if not recipes:
        raise HeadwaterError("give a recipe, for example: headwater train quickstart (`headwater recipes` lists more)")
    if all((builtin := find_builtin(name)) is not None and builtin.is_part for name in recipes):
        raise HeadwaterError(
            f"{recipes[0]}: has only the settings of an algorithm; name a recipe with a model and data before it, for "
            f"example: headwater train quickstart {recipes[0]}"
        )
