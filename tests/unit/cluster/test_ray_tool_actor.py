"""What an actor of tools answers. Its class runs in this process; ``integration/test_ray_actors.py`` has real ones."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("ray")

from workflows.pictures import data_config, picture, watched

from headwater.cluster.ray_workers import Order, ToolActor, ToolReply
from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.data.media import MediaSettings
from headwater.tools.base import ToolResponse
from headwater.tools.config import read_entries


def ask(tool: Any, media: MediaSettings) -> ToolReply:
    async def run() -> ToolReply:
        actor = ToolActor("tools-0", ToolsConfig(), SandboxConfig(), media)
        entries = read_entries(ToolsConfig(), [tool])
        await actor.call(entries, Order(0, 0, "create", "episode"))
        reply = await actor.call(entries, Order(1, 0, "execute", "episode", ({},)))
        await actor.close(10.0)
        return reply

    return asyncio.run(run())


def test_pictures_of_tools_have_the_limits_of_the_run():
    def draw() -> Any:
        """Draw a picture and a video."""
        return ToolResponse("Blue.", image=picture("blue", (112, 112)), video=[picture("red", (56, 56))] * 6)

    reply = ask(draw, MediaSettings.of(data_config(max_image_pixels=28 * 28, max_video_frames=2)))
    image, video = reply.value.media
    assert (image.images()[0].size, [each.size for each in video.images()]) == ((28, 28), [(28, 28)] * 2)


def test_the_actor_answers_others_while_pictures_are_decoded():
    threads: list[threading.Thread] = []

    def draw() -> Any:
        """Draw a picture."""
        return ToolResponse("Blue.", image=watched("blue", threads))

    assert len(ask(draw, MediaSettings()).value.media) == 1
    assert threads
    assert threading.main_thread() not in threads


def test_pictures_that_the_run_would_not_read_are_refused():
    def draw() -> Any:
        """Name a file on the network."""
        return ToolResponse("Blue.", image="https://example.com/blue.png")

    name, text = ask(draw, MediaSettings.of(data_config())).raised
    assert name == "BadResult"
    assert "data.allow_remote_media" in text
