"""SGLang servers as a backend.

- ``dialect.py``: what differs between versions of SGLang.
- ``http.py``: its calls, as the connection of a ``vllm.session.Session``, which keeps the open requests.
- ``engine.py``: ``SglangEngine``, the ``InferenceEngine``.
"""
