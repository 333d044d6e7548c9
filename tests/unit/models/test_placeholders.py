"""Prompts with one placeholder per image, as other programs exchange them."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from headwater.chat.render import render_chat
from headwater.core.media import MediaContent
from headwater.models.load import load_processor
from headwater.models.vision.placeholders import collapse, expand, placeholder_ids


def picture(colour: str, size: tuple[int, int]) -> MediaContent:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "PNG")
    return MediaContent.of("image", [stream.getvalue()])


@pytest.mark.parametrize("preset", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3"])
def test_a_collapsed_prompt_has_one_placeholder_per_image_and_expands_to_the_same_tokens(preset):
    processor = load_processor(f"tiny:{preset}")
    contents = [picture("red", (56, 56)), picture("blue", (140, 60))]
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
    text = render_chat(processor.template, [{"role": "user", "content": parts}])
    tokens, media = processor.encode(text, contents)
    short = collapse(tokens, media, processor)
    (mark,) = [token for token, kind in placeholder_ids(processor).items() if kind == "image"]
    assert short.count(mark) == 2
    assert len(short) < len(tokens)
    assert expand(short, contents, processor) == (tokens, media)
    at = short.index(mark)
    assert expand([*short[:at], mark, *short[at:]], contents, processor) == (tokens, media), "a run counts as one"
    assert collapse((*tokens, mark), media, processor) == [*short, mark], "a token that the model has sampled"
    with pytest.raises(ValueError, match="precedes an image"):
        collapse((mark, *tokens), tuple(item.moved(1) for item in media), processor)
    with pytest.raises(ValueError, match="are not those that the model's processor makes of it"):
        collapse(tokens, tuple(item.moved(1) for item in media), processor)
    with pytest.raises(ValueError, match="2 placeholders for 1 images"):
        expand(short, contents[:1], processor)
    assert collapse(tokens, (), processor) == list(tokens)
