"""SGLang as a backend: servers that run already, or servers that the run starts.

- ``wire.py``: requests and answers of ``/generate``, and what differs between versions of SGLang.
- ``http.py``: the calls to a server.
- ``weights.py``: weights over a process group (``/update_weights_from_distributed``).
- ``engine.py``: ``SglangEngine``, the ``InferenceEngine``.
"""
