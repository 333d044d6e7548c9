"""SGLang as a backend: servers that run already, or servers that the run starts.

- ``http.py``: its calls, and what differs between versions of SGLang.
- ``weights.py``: weights over a process group (``/update_weights_from_distributed``).
- ``engine.py``: ``SglangEngine``, the ``InferenceEngine``.
"""
