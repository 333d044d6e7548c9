"""Judging programs that a model wrote by unit tests in the sandbox; ``scorers/code.py`` is the scoring function.

`cases.py` reads the tests of a row. `judge.py` runs them with the functions in `inside.py`, which it sends into the
sandbox, and compares output and return values.
"""
