"""``headwater recipes``: the built-in recipes."""

from __future__ import annotations

import argparse
import textwrap

HELP = "List the built-in recipes, or print one."
EXAMPLES = """\
examples:
  headwater recipes                            names and a line on each
  headwater recipes quickstart > my.yaml       a copy to change
  headwater train quickstart dapo              a recipe, with the settings of an algorithm

A recipe of your own can extend them: `extends: quickstart`, or `extends: [quickstart, dapo]`."""
_WIDTH = 118


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe")


def run(args: argparse.Namespace) -> int:
    from headwater.config.builtin import BuiltinRecipe, builtin_recipes, find_builtin
    from headwater.core.errors import UnknownName
    from headwater.core.registry import nearest

    recipes = builtin_recipes()
    if args.name is not None:
        recipe = find_builtin(args.name)
        if recipe is None:
            names = [each.name for each in recipes]
            raise UnknownName(f"{args.name}: no such built-in recipe; {nearest(args.name, names)}")
        print(recipe.path.read_text(encoding="utf-8"), end="")
        return 0
    width = max(len(recipe.name) for recipe in recipes) + 4

    def show(title: str, listed: list[BuiltinRecipe]) -> None:
        print(title)
        for recipe in listed:
            text = f"  {recipe.name:<{width - 2}}{recipe.summary}"
            print(textwrap.fill(text, _WIDTH, subsequent_indent=" " * width))

    show("Complete recipes, for headwater train NAME:", [each for each in recipes if not each.is_part])
    print()
    show("Algorithms to combine, as in headwater train quickstart NAME:", [each for each in recipes if each.is_part])
    return 0
