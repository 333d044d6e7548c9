"""``headwater config``: every setting of a recipe, and where its value comes from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from headwater.config.explain import Explained

HELP = "Show every setting of a recipe: its value, where it was set, and what it means."
PIPE_WIDTH = 180
WIDE = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headwater config [RECIPE ...] [key=value ...] [--only SECTION] [--plain]"
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="RECIPE, key=value",
        help="built-in recipes or YAML files, merged in order (leave them out for the defaults), and settings that "
        "override them",
    )
    parser.add_argument("--plain", action="store_true", help="print the resolved recipe as YAML")
    parser.add_argument("--only", metavar="SECTION", default="", help="print one section, for example rollout")


def run(args: argparse.Namespace) -> int:
    from headwater.config.builtin import split_arguments
    from headwater.config.explain import explain, to_yaml
    from headwater.config.load import load_config
    from headwater.config.notices import config_notices

    recipes, overrides = split_arguments(args.arguments)
    _check_section(args.only)
    loaded = load_config(recipes, overrides)
    if args.plain:
        print(to_yaml(loaded.config, args.only), end="")
        return 0

    from headwater.cli.process import pipe_console

    rows = [row for row in explain(loaded) if not args.only or row.key.startswith(f"{args.only}.")]
    console = pipe_console()
    if not console.is_terminal:
        # A pipe has no width, and Rich's narrow default would truncate keys and file names.
        console = pipe_console(width=max(console.width, PIPE_WIDTH))
    for section in dict.fromkeys(row.key.partition(".")[0] for row in rows):
        grouped = [row for row in rows if row.key.startswith(f"{section}.")]
        console.print(_table(section, grouped, wide=console.width >= WIDE))
    for notice in config_notices(loaded.config, loaded.given):
        console.print(f"Note: {notice}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _check_section(name: str) -> None:
    from headwater.config.keys import sections
    from headwater.config.schema import Config
    from headwater.core.errors import ConfigError
    from headwater.core.registry import nearest

    known = sorted(section for section in sections(Config) if section and "." not in section)
    if name and name not in known:
        raise ConfigError([f"--only {name}: no such section; {nearest(name, known)}"], "the command line")


def _table(section: str, rows: list[Explained], *, wide: bool) -> Table:
    """One section. Unless the terminal is ``wide``, explanations are printed below the values."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from headwater.config.tree import DEFAULT, show

    table = Table(title=Text(section, style="bold"), title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=32 if wide else None)
    for row in rows:
        given = row.origin != DEFAULT
        value = show(list(row.value) if isinstance(row.value, tuple) else row.value)
        # Text objects, because a value such as [arithmetic] would be parsed as markup.
        cells = [
            Text(value, style="bold green" if given else "dim"),
            Text(row.origin, style="green" if given else "dim"),
            Text(row.text, style="" if given else "dim"),
        ]
        if not wide:
            cells = [Text.assemble(cells[0], "  ", cells[1], "\n", cells[2])]
        table.add_row(Text(row.key.partition(".")[2], style="bold" if given else ""), *cells)
    return table
