"""The command line. Each command is one file in this folder, which is imported only when the command is used."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import headwater
from headwater.cli.process import EXIT_INTERRUPTED, EXIT_NO_READER, EXIT_USER_ERROR, interruptible, is_reader_gone
from headwater.cluster import num_launched
from headwater.core.errors import HeadwaterError
from headwater.core.registry import nearest

COMMANDS = {
    "train": "train a model from a recipe, or resume a run",
    "replay": "repeat a run made with engine.deterministic=true, and compare the weights of every step",
    "eval": "show the mean reward of a run's model, or of any model, on held-out prompts",
    "export": "write a run's model as a folder that transformers and vLLM load",
    "serve": "serve a model over HTTP with OpenAI's and SGLang's APIs",
    "route": "one address in front of several servers",
    "servers": "list, add, drain or remove the servers of a run while it runs",
    "plan": "predict speed and the best division of GPUs, by simulating the scheduler",
    "recipes": "list the built-in recipes, or print one",
    "config": "show every setting of a recipe: its value, where it was set, and what it means",
    "doctor": "show whether a run is alive, what it waits for, and what usually helps",
    "ui": "open a web page that shows runs, live or finished, down to single tokens",
    "fetch": "download a model that recipes can name",
}


HELP_WIDTH = 100
_DEBUG_HELP = "show a traceback for every error, and debug logs"


def main(arguments: Sequence[str] | None = None) -> int:
    code = _guarded(arguments)
    torchrun = sys.modules.get("headwater.cluster.torchrun")
    if torchrun is not None and torchrun.is_stuck():
        # A thread is blocked in a collective operation, which would keep the interpreter from ending.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def _guarded(arguments: Sequence[str] | None) -> int:
    """Run the command; interrupts and a closed output become exit statuses."""
    try:
        with interruptible():
            try:
                return _main(arguments)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # a failure is handled here and not at interpreter exit
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError as error:
        if not _is_of_our_output(error):
            raise
        from headwater.observe.progress import discard

        discard(sys.stdout)
        return EXIT_NO_READER


def _main(arguments: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _top_parser()
    before, rest = _split_at_command(arguments)
    options = parser.parse_args(before)
    if options.command is not None and options.command not in COMMANDS:
        parser.error(_unknown(options.command))
    if options.command is None:
        parser.print_help()
        return EXIT_USER_ERROR
    return _run_command(options.command, [*rest, "--debug"] if options.debug else rest)


def _top_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="headwater",
        usage="headwater [-h] [--version] [--debug] COMMAND ...",
        description="Reinforcement-learning post-training of language models.",
        epilog=f"commands:\n{listing}\n\nStart with:  headwater train quickstart\n"
        "Help on one: headwater COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headwater {headwater.__version__}")
    parser.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    # The epilog lists the commands.
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    return parser


def _unknown(name: str) -> str:
    from headwater.config.builtin import SUFFIXES, find_builtin

    if name.endswith(SUFFIXES) or find_builtin(name):
        return f"{name!r} is a recipe, not a command; write: headwater train {name}"
    return f"unknown command {name!r}; {nearest(name, list(COMMANDS))}"


def _split_at_command(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments up to the command, and the arguments of the command."""
    for place, argument in enumerate(arguments):
        if not argument.startswith("-"):
            return arguments[: place + 1], arguments[place + 1 :]
    return arguments, []


def _run_command(name: str, arguments: list[str]) -> int:
    module = importlib.import_module(f"headwater.cli.{name}")
    parser = argparse.ArgumentParser(
        prog=f"headwater {name}",
        description=textwrap.fill(module.HELP, HELP_WIDTH),
        formatter_class=argparse.RawDescriptionHelpFormatter,  # an epilog with examples keeps its lines
    )
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.DEBUG if options.debug else logging.WARNING, format="%(levelname)s %(message)s")
    # The tokenizers library prints warnings after a fork, which would garble progress bars.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if num_launched() > 1 and name not in ("train", "replay"):
            raise HeadwaterError(
                f"WORLD_SIZE = {num_launched()}: {name} runs in one process; start it without torchrun"
            )
        code: int = module.run(options)
    except (HeadwaterError, OSError) as error:  # OSError: such as a full disk or a read-only folder
        if options.debug or _is_of_our_output(error):
            raise
        print(f"error: {_told(error)}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return EXIT_USER_ERROR
    return code


def _told(error: Exception) -> Exception:
    """The error as it is shown. For a full disk, the message also names the disk and its free space."""
    from headwater.core.disk import disk_full

    if not isinstance(error, OSError):
        return error
    name = error.filename if isinstance(error.filename, str) else "."
    return disk_full(error, Path(name), "a file") or error


def _is_of_our_output(error: Exception) -> bool:
    return isinstance(error, BrokenPipeError) and is_reader_gone()


if __name__ == "__main__":
    sys.exit(main())
