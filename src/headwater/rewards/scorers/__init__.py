"""Scoring functions, one file each, chosen by a row's ``data_source``.

All have the signature ``compute_score(data_source, solution_str, ground_truth, extra_info, **settings)`` and return a
number, a dict with a ``score`` entry, or an awaitable of either. They run in worker processes, so they may block.
The data sources of a scorer are declared where it is registered:

    @SCORERS.register(ScorerTraits(data_sources=("lighteval/MATH", "numina_*")))
    def math(...): ...
"""

from fnmatch import fnmatchcase
from functools import lru_cache

from headwater.config.traits import ScorerTraits
from headwater.core.errors import UnknownName
from headwater.core.registry import Registry, is_path, nearest

SCORERS = Registry("scorer", "headwater.rewards.scorers")


def _traits_of(scorer: str) -> ScorerTraits:
    from headwater.config.declared import read_declared  # slow to import, and reward workers do not need it

    declared = read_declared(ScorerTraits, scorer)
    return declared.traits if declared is not None else ScorerTraits()


def is_quick(name: str) -> bool:
    """Whether ``name`` is a built-in scorer that takes microseconds, so that it is called directly."""
    return bool(name) and not is_path(name) and _traits_of(name).is_quick


@lru_cache(maxsize=1)
def declared_sources() -> dict[str, str]:
    """The scorer of each declared data source, in lower case."""
    found: dict[str, str] = {}
    for scorer in SCORERS.names():
        for source in _traits_of(scorer).data_sources:
            if found.setdefault(source.lower(), scorer) != scorer:
                raise ValueError(f"data source {source!r} is declared by two scorers, {scorer} and {found[source]}")
    return found


def scorer_of(data_source: str) -> str:
    """The name of the scorer of a data source: one that declares it, or the one that it names.

    ``reasoning_gym:leg_counting`` and ``openai/gsm8k`` name the scorers ``reasoning_gym`` and ``gsm8k``.
    """
    sources, names = declared_sources(), SCORERS.names()
    short = data_source.partition(":")[0].rpartition("/")[2]
    for name in (data_source.lower(), short.lower()):
        if name in sources:
            return sources[name]
        if name in names:
            return name
    patterns = (pattern for pattern in sources if "*" in pattern and fnmatchcase(short.lower(), pattern))
    if pattern := max(patterns, key=len, default=""):
        return sources[pattern]
    owners = {source.rpartition("/")[2]: scorer for source, scorer in sources.items()}
    if short.lower() in owners:
        return owners[short.lower()]
    raise UnknownName(f"unknown scorer {short!r}; {nearest(short, names)}")
