"""HTTP over any ``InferenceEngine``: the OpenAI and SGLang APIs, and Headwater's own generation and control calls.

Pure functions parse a request body into records (``openai/``, ``sglang/``, ``native/``, ``control.py``),
``generation.py`` runs the records, and pure functions format the reply. Only ``routes.py``, ``control_routes.py``,
``weight_stream.py``, ``app.py``, ``listen.py``, ``reading.py``, ``state.py`` and ``generation.py`` use aiohttp.
"""
