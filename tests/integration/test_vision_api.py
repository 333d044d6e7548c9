"""Vision from Python: training on Pillow images, and asking the trained model."""

from __future__ import annotations

import pytest
from PIL import Image

import headwater

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vision")]
COLORS = ("red", "green", "blue", "white")


def share_of_red(solution_str: str, images: list) -> float:
    """Differs between responses, and needs the picture."""
    pixel = images[0].getpixel((0, 0))
    return pixel[0] / 255 + len(solution_str) / 100


def test_train_on_pillow_images_and_ask_the_model(tmp_path):
    rows = [
        {"prompt": "<image>Which color?", "images": [Image.new("RGB", (56, 56), color)], "ground_truth": color}
        for color in COLORS * 2
    ]
    result = headwater.train(
        data=rows,
        eval_data=rows[:2],
        reward=share_of_red,
        model="tiny:qwen2_5_vl",
        run={"root": str(tmp_path), "name": "python"},
        rollout={"num_samples_per_prompt": 2, "max_new_tokens": 6},
        trainer={"total_steps": 2, "num_prompts_per_step": 4},
        progress=False,
    )
    assert len(list((tmp_path / "python" / "media").iterdir())) == 4, "every picture once"
    with headwater.Engine(tmp_path / "python") as engine:
        red, blue = (Image.new("RGB", (56, 56), color) for color in ("red", "blue"))
        both = engine.chat(["Which color?"] * 2, images=[[red], [blue]], max_new_tokens=6, temperature=0)
        part = {"type": "image", "image": red}
        chat = [{"role": "user", "content": [part, {"type": "text", "text": "Which color?"}]}]
        assert engine.chat(chat, max_new_tokens=6, temperature=0).tokens == both[0].tokens
        assert both[0].logprobs != both[1].logprobs
        raw = "<|user|><|vision_start|><|image_pad|><|vision_end|>Which color?<|end|><|assistant|>"
        assert engine.generate(raw, images=[red], max_new_tokens=6, temperature=0).tokens == both[0].tokens
        with pytest.raises(headwater.HeadwaterError, match=r"1 placeholders .* for 2 images"):
            engine.generate(raw, images=[red, blue])
        with pytest.raises(headwater.HeadwaterError, match="the chat has 0 parts for the 1 images"):
            engine.generate([{"role": "user", "content": "Which?"}], images=[red])
    with headwater.Engine("tiny:qwen3") as engine, pytest.raises(headwater.HeadwaterError, match="takes only text"):
        engine.chat("Which color?", images=[red])
    assert result is not None
