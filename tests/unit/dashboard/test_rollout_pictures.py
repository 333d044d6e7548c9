"""Images of rollouts: where they are shown, who may ask for them, and what an exported file has of them."""

from __future__ import annotations

import base64
import json
import re

import pytest
from dashboard.parts import make_run, page, served
from dashboard.pictured import FILM, RED, SHOWN_LATER, picture, save_pictures

from headwater.core.media import MediaContent
from headwater.dashboard import export as exporting
from headwater.dashboard.answers import Answers
from headwater.dashboard.pictures import media_of
from headwater.dashboard.runs import Place, Runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("runs"), num_steps=1)
    save_pictures(run, step=2)
    return run


ID = "step_000002:0"


def test_a_rollout_tells_its_images_and_the_tokens_that_stand_for_them(run):
    with served(run.path) as client:
        shown = client.get("/runs/first/rollout", id=ID)
        red, later, film = shown["media"]
        assert (red["kind"], red["digest"], red["num_frames"], red["blocks"]) == ("image", RED.digest, 1, [[1, 3]])
        assert [length for _, length in later["blocks"]] == [1, 2]
        assert (film["kind"], film["num_frames"], film["frames_per_s"]) == ("video", 2, 2.0)
        assert [message.get("parts") for message in shown["messages"]] == [
            [{"type": "image", "digest": RED.digest}, {"type": "text", "text": "<b>What</b> is it?"}],
            None,
            [{"type": "image", "digest": SHOWN_LATER.digest}, {"type": "video", "digest": FILM.digest}],
        ]
        group = client.get("/runs/first/group", step=2, uid=shown["uid"])
        assert [item["digest"] for item in group["media"]] == [RED.digest], "of the prompt"
        assert group["rollouts"][1]["media"] == shown["media"]
        assert client.get("/runs/first/rollout", id="step_000001:0")["media"] == []


def test_images_are_sent_by_their_digest_alone(run):
    (run.path / "secret.png").write_bytes(picture("black"))
    outside = run.path.parent / "outside.png"
    outside.write_bytes(picture("black"))
    linked = MediaContent.of("image", [picture("black")])
    (run.media / f"{linked.digest}.png").symlink_to(outside)
    script = MediaContent.of("image", [b"<svg onload='alert(1)'>"])
    (run.media / f"{script.digest}.png").write_bytes(script.frames[0])
    changed = MediaContent.of("image", [picture("yellow")])
    (run.media / f"{changed.digest}.png").write_bytes(picture("pink"))
    with served(run.path) as client:

        def asked(query: str, headers=None):
            return client.raw(f"/api/runs/first/media?{query}", headers)

        for content, query, kind in (
            (RED.frames[0], f"digest={RED.digest}", "image/png"),
            (SHOWN_LATER.frames[0], f"digest={SHOWN_LATER.digest}", "image/jpeg"),
            (FILM.frames[1], f"digest={FILM.digest}&frame=1", "image/png"),
        ):
            reply, body = asked(query)
            assert (reply.status, reply.headers["Content-Type"], body) == (200, kind, content)
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
        for query, status in (
            ("", 400),
            ("digest=../secret", 400),
            ("digest=" + "%2e%2e%2f" * 10, 400),
            (f"digest={RED.digest.upper()}", 400),
            (f"digest={RED.digest}%00", 400),
            (f"digest={FILM.digest}&frame=-1", 400),
            (f"digest={FILM.digest}&frame=x", 400),
            (f"digest={FILM.digest}&frame=2", 404),
            (f"digest={FILM.digest}", 404),
            (f"digest={'0' * 64}", 404),
            (f"digest={linked.digest}", 404),
            (f"digest={script.digest}", 422),
            (f"digest={changed.digest}", 422),
        ):
            reply, body = asked(query)
            assert (query, reply.status) == (query, status)
            assert json.loads(body)["error"]["message"].endswith(".")
        assert client.raw(f"/api/runs/other/media?digest={RED.digest}")[0].status == 404
        assert asked(f"digest={RED.digest}", {"Host": "evil.example"})[0].status == 403
        assert asked(f"digest={RED.digest}", {"Origin": "http://evil.example"})[0].status == 403
    with served(run.path, token="secret") as client:
        assert client.raw(f"/api/runs/first/media?digest={RED.digest}")[0].status == 401


def exported(run, rollout=None):
    html = exporting.export(Answers(Runs(Place.of(run.path))), page(), "first", rollout)
    return json.loads(re.search(r'id="headwater-data">(.*?)</script>', html, re.DOTALL)[1])


def test_an_exported_file_has_the_images_of_its_rollouts(run, monkeypatch):
    for rollout in (ID, None):
        data = exported(run, rollout)
        keys = sorted(key for key in data if "/media?" in key)
        wanted = [
            f"digest={RED.digest}",
            f"digest={SHOWN_LATER.digest}",
            *(f"digest={FILM.digest}&frame={at}" for at in (0, 1)),
        ]
        assert keys == sorted(f"/api/runs/first/media?{each}" for each in wanted)
        begin, _, content = data[f"/api/runs/first/media?digest={SHOWN_LATER.digest}"]["url"].partition(",")
        assert (begin, base64.b64decode(content)) == ("data:image/jpeg;base64", SHOWN_LATER.frames[0])
        assert not any("left out" in each for each in data["/api/info"]["exported"]["contents"])
    monkeypatch.setattr(exporting, "_MOST_PICTURE_BYTES", len(RED.frames[0]))
    monkeypatch.setattr(exporting, "_MOST_FRAMES", 1)
    data = exported(run, ID)
    assert data[f"/api/runs/first/media?digest={RED.digest}"]["url"]
    assert data[f"/api/runs/first/media?digest={SHOWN_LATER.digest}"]["url"] is None
    assert "images or frames of videos were left out" in data["/api/info"]["exported"]["contents"][-1]


def test_a_damaged_column_shows_the_rollout_without_images(run):
    for damaged in (None, "", "{", "7", "[7]", '[{"kind": "image"}]', '[{"kind": "image", "digest": "../x"}]'):
        assert media_of(damaged) == []
    half = json.dumps(
        [{"kind": "image", "digest": RED.digest, "files": 3, "blocks": [{"start": -1}, 2, {"start": 1, "length": 2}]}]
    )
    assert media_of(half)[0]["blocks"] == [[1, 2]]
