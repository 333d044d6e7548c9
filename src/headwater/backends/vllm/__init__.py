"""vLLM as a backend: a server that a run starts, servers that run already, or vLLM inside this process.

- ``wire.py``: requests and answers of its token interface, and what differs between versions of vLLM.
- ``http.py``: the calls to a server; ``inprocess.py``: the same calls to vLLM in this process.
- ``launch.py``: the command of a server that a run starts; ``inside/`` is what its workers run.
- ``engine.py``: ``VllmEngine``, the ``InferenceEngine``, and what must be true of a vLLM before a run uses it.
"""
