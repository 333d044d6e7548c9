"""Talking to a ``headwater serve``: requests over one WebSocket, control calls over HTTP.

``launch/`` starts such a server as a child process and keeps it alive.
"""
