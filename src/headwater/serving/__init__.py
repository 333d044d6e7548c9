"""HTTP in front of an engine: SGLang's ``/generate``, OpenAI's completions and chat, and calls of our own.

What a request says is read by pure functions into records (``openai/``, ``sglang/``, ``native/``, ``control.py``), the
records are run by ``generation.py``, and pure functions write the replies. Only files named ``routes.py`` and what
stands around them (``app.py``, ``state.py``, ``listen.py``, ``middleware.py``, ``event_stream.py``,
``native/connection.py``) know aiohttp.
"""
