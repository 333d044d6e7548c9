"""Judging programs that a model wrote by unit tests in the sandbox; ``scorers/code.py`` is the scoring function.

`cases.py` reads the tests of a row, `response.py` finds the program in a response, `judge.py` runs the tests with the
functions in `inside.py`, which it sends into the sandbox, and `compare.py` compares output and return values.
"""
