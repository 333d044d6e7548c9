"""Tools that return pictures, and the settings of runs in which an untrained vision model calls them."""

from __future__ import annotations

import base64
import io
from typing import Any

from headwater.tools.base import ToolResponse

ODD, OWN = "tests/integration/odd_tools.py", "tests/integration/picture_tools.py"
VISION = ["tests/integration/pictures.yaml"]
TOOLS = [
    "rollout.workflow=tool_agent", f"tools.use=[{OWN}:wide, {OWN}:framed, {ODD}:fine]",
    f"tools.parser={ODD}:EveryReply",
    "rollout.workflow_args={max_turn_tokens: 4, max_assistant_turns: 3}", "rollout.max_new_tokens=96",
    "data.max_prompt_tokens=160",
]  # fmt: skip


def picture(color: str, size: tuple[int, int]) -> Any:
    from PIL import Image

    return Image.new("RGB", size, color)


def wide() -> Any:
    """Shows a wide picture."""
    return picture("orange", (84, 56))


def framed() -> ToolResponse:
    """Shows two small pictures, of which one is encoded."""
    stream = io.BytesIO()
    picture("purple", (28, 28)).save(stream, "png")
    url = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    return ToolResponse("Two pictures.", image=[picture("gray", (28, 56)), url])
