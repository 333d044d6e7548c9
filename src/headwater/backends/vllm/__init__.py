"""vLLM as a backend: a server that a run starts, servers that run already, or vLLM inside this process.

- ``dialect.py``: what differs between versions of vLLM.
- ``wire.py``: requests and answers of its token interface, the same over HTTP and inside a process.
- ``link.py``: the calls to one vLLM; ``http.py`` makes them over HTTP, ``inprocess.py`` in this process.
- ``session.py``: the open requests, the gate before them, weight updates and versions of tokens.
- ``engine.py``: ``VllmEngine``, the ``InferenceEngine``.
- ``launch.py``: the command of a server that a run starts; ``child.py`` is what its Python runs.
"""
