"""Runs rollout classes that were written for verl or AReaL. See docs/coming-from-verl.md and docs/coming-from-areal.md.

``verl.py`` and ``areal.py`` hold the names that such a file imports; ``verl_loop.py`` and ``areal_workflow.py`` run the
classes. Everything a class returns is compared with what the engine sampled (``journal.py``).
"""
