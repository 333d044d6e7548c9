"""Agents that train in tests. They use only the standard library, so that their processes start fast."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
import zlib
from urllib.parse import urlsplit

AGAIN = {"role": "user", "content": "Sure?"}


def ask(base_url: str, api_key: str, messages: list) -> dict:
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=600)
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 6})
    connection.request("POST", f"{parts.path}/chat/completions", body, headers)
    return json.loads(connection.getresponse().read())["choices"][0]["message"]


def two_turns(base_url, api_key, messages):
    first = ask(base_url, api_key, messages)
    ask(base_url, api_key, [*messages, first, AGAIN])


def unreliable(base_url, api_key, messages, data):
    """On some rows it fails, in five ways."""
    kind = zlib.crc32(data["uid"].encode()) % 10
    if kind == 0:
        return 1.0  # without a call
    two_turns(base_url, api_key, messages)
    if kind == 1:
        raise ValueError("a bad row")
    if kind == 2:
        sys.exit(4)
    if kind == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == 4:
        time.sleep(600)
    return None
