"""A router: one ``InferenceEngine`` over many.

- ``policy.py`` decides which server gets a request, without input or output.
- ``work.py`` is one request on its way, with what has been generated for it.
- ``member.py`` is one server as the router sees it: its state, health checks and control calls.
- ``roster.py`` has the servers and their requests: who may get requests, who is lost, who comes back.
- ``requests.py`` follows a request from server to server until it has ended.
- ``engine.py`` is the engine: control calls to all servers, and their common status.
- ``updates.py`` sends a weight update to all servers.
- ``routes.py`` has the calls to list, add, drain and remove servers, for ``headwater route`` and for runs.
- ``run_calls.py`` lets ``headwater servers`` make these calls to a run.
"""
