"""Single turn with a verifiable reward: one prompt, one reply, one score."""

from __future__ import annotations

from headwater.core.records import Trajectory
from headwater.workflows import WORKFLOWS, Episode


@WORKFLOWS.register
async def rlvr(episode: Episode) -> Trajectory:
    await episode.reply()
    return episode.finish(await episode.score())
