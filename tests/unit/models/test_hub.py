"""A model that the hub does not give is reported at once, with what was tried."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from headwater.core.errors import ModelError
from headwater.models import source
from headwater.models.source import check_model, find_hub_model


class Hub(BaseHTTPRequestHandler):
    """Has one model, and refuses the rest as the hub does."""

    asked: list[str] = []  # noqa: RUF012  of all requests

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        self.send_response(200 if self.path.startswith("/org/real/") else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(source, "CONNECT_LIMIT_S", 120.0)  # the machine may be busy
    Hub.asked.clear()
    yield address
    server.shutdown()
    server.server_close()


def test_a_model_that_the_hub_has(hub: str) -> None:
    for _ in range(2):
        assert find_hub_model("org/real", "model.path") == "org/real"
    assert Hub.asked == ["/org/real/resolve/main/config.json"]


def test_a_model_that_the_hub_has_not(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    with pytest.raises(ModelError) as caught:
        check_model("runs/quickstrat", "RUN")
    assert str(caught.value).startswith(
        f"RUN = runs/quickstrat: no such folder in {tmp_path}, not among the downloaded"
    )
    assert f"{hub} has no model of that name" in str(caught.value)
    assert str(caught.value).endswith("did you mean runs/quickstart?")


def test_a_hub_that_cannot_be_reached(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelError, match=r"http://127.0.0.1:1 cannot be reached \(\w+: .*\); check the name"):
        check_model("org/name")
    # The copy of an earlier download is used.
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = find_hub_model("org/name", "model.path")
    assert isinstance(found, Path)
    assert found.name == "abc"
