"""Servers of other programs as backends: what vLLM and SGLang have in common.

- ``link.py``: the calls to one server, and the records that they exchange; ``http.py`` makes calls over HTTP.
- ``requests.py``: the open requests. ``session.py``: when they are sent, weight updates and versions of tokens.
- ``servers.py``: a server that runs already, or one that the run starts and keeps alive.
- ``thread.py``: the thread of an engine, which the native backend uses too. ``model.py``: the model of the run.
- ``engine.py``: ``RemoteEngine``, which ``backends/vllm`` and ``backends/sglang`` complete.
- ``inside/``: what the Python of the other program runs.
"""
