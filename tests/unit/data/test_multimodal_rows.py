from __future__ import annotations

import io

import datasets
import numpy as np
import pytest
from PIL import Image

from headwater.config.schema import DataConfig
from headwater.core.errors import DataError
from headwater.data.rlhf_dataset import RLHFDataset

IMAGE_TOKENS = 16
"""A 16x16 image in patches of 4x4."""


def picture(color):
    return Image.new("RGB", (20, 16), color)


def png(color):
    stream = io.BytesIO()
    picture(color).save(stream, "png")
    return stream.getvalue()


def color_of(image):
    return image.convert("RGB").getpixel((0, 0))


def build(source, tokenizer, processor, **settings):
    return RLHFDataset([source], DataConfig(**settings), tokenizer, processor=processor)


def test_placeholders_become_parts_and_image_tokens(tokenizer, processor, write_parquet):
    row = {"prompt": [{"role": "user", "content": "A <image>and <image>?"}], "images": [{"bytes": png("red")}] * 2}
    prompt = build(write_parquet([row]), tokenizer, processor)[0]
    content = [
        {"type": "text", "text": "A "},
        {"type": "image"},
        {"type": "text", "text": "and "},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]
    assert prompt.messages == ({"role": "user", "content": content},)
    assert prompt.text == "[user]A <image>and <image>?<|end|>[assistant]"
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    assert prompt.tokens.count(image_token) == 2 * IMAGE_TOKENS
    others = [token for token in prompt.tokens if token != image_token]
    assert others == tokenizer.encode("[user]A and ?<|end|>[assistant]", add_special_tokens=False)
    assert [color_of(image) for image in prompt.multi_modal["images"]] == [(255, 0, 0)] * 2
    assert list(prompt.multi_modal) == ["images"]


def test_every_way_to_give_an_image(tokenizer, processor, tmp_path):
    (tmp_path / "blue.png").write_bytes(png("blue"))
    ways = [
        png("blue"),
        {"bytes": png("blue")},
        {"bytes": png("blue"), "path": "gone.png"},
        {"bytes": None, "path": str(tmp_path / "blue.png")},
        {"path": str(tmp_path / "blue.png")},
        str(tmp_path / "blue.png"),
        picture("blue").convert("RGBA"),
    ]
    dataset = build([{"prompt": "<image>", "images": [way]} for way in ways], tokenizer, processor)
    images = [prompt.multi_modal["images"][0] for prompt in dataset]
    assert [color_of(image) for image in images] == [(0, 0, 255)] * len(ways)
    assert {image.mode for image in images} == {"RGB"}


def test_relative_paths_start_at_the_data_file(tokenizer, processor, tmp_path, write_jsonl):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(png("lime"))
    path = write_jsonl([{"prompt": "<image>", "images": "pictures/a.png"}])
    assert color_of(build(path, tokenizer, processor)[0].multi_modal["images"][0]) == (0, 255, 0)


def test_datasets_image_column(tokenizer, processor):
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    source = datasets.Dataset.from_list([{"prompt": "<image>", "images": [{"bytes": png("red")}]}], features=features)
    assert color_of(build(source, tokenizer, processor)[0].multi_modal["images"][0]) == (255, 0, 0)


def test_image_tokens_count_towards_the_limit(tokenizer, processor):
    rows = [{"prompt": "<image>" * count, "images": [picture("red")] * count} for count in (1, 2, 3)]
    dataset = build(rows, tokenizer, processor, max_prompt_tokens=60)
    assert dataset.num_filtered == 1
    assert [len(prompt.multi_modal["images"]) for prompt in dataset] == [1, 2]
    cut = build(rows, tokenizer, processor, max_prompt_tokens=60, truncation="left")
    with pytest.raises(DataError, match=r"row 2: prompt of .*cannot be cut"):
        cut[2]


def test_text_rows_beside_image_rows(tokenizer, processor, write_parquet):
    rows = [{"prompt": "<image>?", "images": [{"bytes": png("red")}]}, {"prompt": "Hi", "images": None}]
    dataset = build(write_parquet(rows), tokenizer, processor)
    assert dataset[1].messages == ({"role": "user", "content": "Hi"},)
    assert dataset[1].multi_modal == {}


def test_without_a_column_a_placeholder_is_text(tokenizer):
    prompt = RLHFDataset([[{"prompt": "the <image> tag"}]], DataConfig(), tokenizer)[0]
    assert prompt.messages[0]["content"] == "the <image> tag"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Hi", "images": ["a.png"]}, "prompt has 0 <image> and images holds 1; write one <image> per image"),
        ({"prompt": "<image>", "images": []}, "prompt has 1 <image> and images holds 0"),
        ({"prompt": "<image>", "images": None}, "prompt has 1 <image> and images holds 0"),
        ({"prompt": "<video>", "images": [], "videos": None}, "prompt has 1 <video> and videos holds 0"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "prompt has 1 <image> and images holds 0"),
        ({"prompt": "<image>", "images": ["absent.png"]}, r"images\[0\]: no such file: absent.png"),
        ({"prompt": "<image>", "images": [b"not an image"]}, r"images\[0\]: not a readable image"),
        ({"prompt": "<image>", "images": [png("red")[:60]]}, r"images\[0\]: not a readable image"),
        ({"prompt": "<image>", "images": [3]}, r"images\[0\]: a int is not an image; give a path"),
        ({"prompt": "<image>", "images": [{"bytes": None}]}, r"images\[0\]: a NoneType is not an image"),
        ({"prompt": "<video>", "videos": ["absent.mp4"]}, r"videos\[0\]: no such file: absent.mp4"),
        ({"prompt": "<video>", "videos": [[3]]}, r"videos\[0\] frame 0: a int is not an image"),
    ],
)
def test_bad_rows(tokenizer, processor, row, message):
    with pytest.raises(DataError, match=f"dataset object, row 0: {message}"):
        build([row], tokenizer, processor)


def test_images_without_a_processor(tokenizer):
    with pytest.raises(DataError, match="row 0: the row has images or videos, but no processor was loaded"):
        build([{"prompt": "<image>", "images": [picture("red")]}], tokenizer, None)


def test_other_columns(tokenizer, processor):
    prompt = build([{"prompt": "<image>", "photo": picture("red")}], tokenizer, processor, image_key="photo")[0]
    assert len(prompt.multi_modal["images"]) == 1


class VideoProcessor:
    """Stands in for a video processor, which transformers cannot build without torchvision: one token per frame."""

    chat_template = "x"

    def apply_chat_template(self, conversation, **kwargs):
        return "".join(f"<{part['type']}>" for part in conversation[0]["content"])

    def __call__(self, *, text, videos, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [[7] * sum(len(video) for video in videos)]}


def test_videos_as_frames_or_arrays(tokenizer):
    rows = [
        {"prompt": "<video>", "videos": [[picture("red"), png("blue")]]},
        {"prompt": "<video>", "videos": [np.zeros((3, 4, 4, 3), np.uint8)]},
    ]
    frames, array = build(rows, tokenizer, VideoProcessor())
    assert [color_of(frame) for frame in frames.multi_modal["videos"][0]] == [(255, 0, 0), (0, 0, 255)]
    assert frames.tokens == (7, 7)
    assert frames.text == "<video>"
    assert array.tokens == (7, 7, 7)
    assert array.multi_modal["videos"][0].shape == (3, 4, 4, 3)
