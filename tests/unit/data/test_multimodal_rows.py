from __future__ import annotations

import io

import datasets
import numpy as np
import pytest
from PIL import Image

from headwater.config.schema import DataConfig
from headwater.core.errors import DataError
from headwater.core.media import MediaBlock, MediaContent
from headwater.data import measure, rlhf_dataset
from headwater.data.prompt_builder import PromptBuilder
from headwater.data.rlhf_dataset import RLHFDataset
from headwater.models.load import load_processor

IMAGE_TOKENS = 2
"""A picture of 56x28 pixels."""
COLORS = {(255, 0, 0): "red", (0, 0, 255): "blue", (0, 255, 0): "lime"}


def picture(color, size=(56, 28)):
    return Image.new("RGB", size, color)


def png(color, size=(56, 28)):
    stream = io.BytesIO()
    picture(color, size).save(stream, "png")
    return stream.getvalue()


def colors(prompt):
    """The colour of the first frame of every image and video."""
    return [COLORS[item.content.images()[0].getpixel((0, 0))] for item in prompt.media]


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
    assert prompt.text == "[user]A <|image_pad|>and <|image_pad|>?<|end|>[assistant]"
    first, second = prompt.media
    start = len("[user]A ")
    assert first.blocks == (MediaBlock(start, IMAGE_TOKENS, (1, 1, 2)),)
    assert second == first.moved(IMAGE_TOKENS + len("and "))
    assert first.content.frames == (png("red"),)
    places = {*first.places(), *second.places()}
    others = [token for place, token in enumerate(prompt.tokens) if place not in places]
    assert others == tokenizer.encode("[user]A and ?<|end|>[assistant]", add_special_tokens=False)


def test_every_way_to_give_an_image(tokenizer, processor, tmp_path):
    (tmp_path / "blue.png").write_bytes(png("blue"))
    ways = [
        png("blue"),
        {"bytes": png("blue")},
        {"bytes": png("blue"), "path": "gone.png"},
        {"bytes": None, "path": str(tmp_path / "blue.png")},
        {"path": str(tmp_path / "blue.png")},
        {"image": (tmp_path / "blue.png").as_uri()},
        {"image": picture("blue"), "max_pixels": 400},
        str(tmp_path / "blue.png"),
        picture("blue").convert("RGBA"),
        np.asarray(picture("blue")),
    ]
    dataset = build([{"prompt": "<image>", "images": [way]} for way in ways], tokenizer, processor)
    assert [colors(prompt) for prompt in dataset] == [["blue"]] * len(ways)
    assert [prompt.media[0].content.images()[0].size for prompt in dataset] == [(56, 28)] * 6 + [(28, 14)] + [
        (56, 28)
    ] * 3
    files = [prompt.media[0].content for prompt in dataset][:6]
    assert {content.frames for content in files} == {(png("blue"),)}
    assert len({content.digest for content in files}) == 1


def test_relative_paths_start_at_the_data_file(tokenizer, processor, tmp_path, write_jsonl):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(png("lime"))
    path = write_jsonl([{"prompt": "<image>", "images": "pictures/a.png"}])
    assert colors(build(path, tokenizer, processor)[0]) == ["lime"]


def test_datasets_image_column(tokenizer, processor):
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = [{"prompt": "<image>", "images": [{"bytes": png("red")}]}]
    source = datasets.Dataset.from_list(rows, features=features)
    # The file of the dataset is used, not a copy of its pixels; unless the user chose another format.
    assert build(source, tokenizer, processor)[0].media[0].content.frames == (png("red"),)
    decoded = build(source.with_transform(lambda batch: batch), tokenizer, processor)[0]
    assert colors(decoded) == ["red"]


def test_image_tokens_count_towards_the_limit(tokenizer, processor):
    rows = [{"prompt": "<image>" * count, "images": [picture("red", (112, 112))] * count} for count in (1, 2, 3)]
    dataset = build(rows, tokenizer, processor, max_prompt_tokens=60)
    assert dataset.num_filtered == 1
    assert dataset.longest_prompt == len("[user][assistant]") + 1 + 32
    assert [len(prompt.media) for prompt in dataset] == [1, 2]
    assert build(rows, tokenizer, processor, max_prompt_tokens=60, max_image_pixels=56 * 56).num_filtered == 0
    cut = build(rows, tokenizer, processor, max_prompt_tokens=60, truncation="left")
    with pytest.raises(DataError, match=r"row 2: prompt of .*cannot be cut"):
        cut[2]


@pytest.mark.slow
def test_workers_count_image_tokens_too(tokenizer, processor, monkeypatch, tmp_path, write_jsonl):
    monkeypatch.setattr(measure, "TEXT_ROWS_PER_IMAGE", 32)
    (tmp_path / "a.png").write_bytes(png("red", (112, 112)))
    path = write_jsonl(
        [{"prompt": "<image>" * (1 + row % 3), "images": ["a.png"] * (1 + row % 3)} for row in range(12)]
    )
    alone, together = (
        build(path, tokenizer, processor, max_prompt_tokens=60, num_filter_workers=workers) for workers in (1, 2)
    )
    assert alone.num_filtered == together.num_filtered == 4
    assert list(alone) == list(together)
    (tmp_path / "a.png").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"line 1: images\[0\]: .*not a readable image"):
        build(path, tokenizer, processor, num_filter_workers=2)


def test_rows_with_images_are_measured_by_workers_sooner():
    assert measure.choose_num_workers(0, 1000) == measure.choose_num_workers(0, 100, has_media=True) == 1
    assert measure.choose_num_workers(3, 9, has_media=True) == 3
    assert measure.choose_num_workers(3, 4, has_media=True) == 1


def test_rows_of_text_are_measured_as_such_with_a_vision_model_too(tokenizer, processor, monkeypatch):
    judged = []

    def choose(num_asked, num_rows, has_media):
        judged.append(has_media)
        return 1

    monkeypatch.setattr(rlhf_dataset, "choose_num_workers", choose)
    part = {"type": "image", "image": picture("red")}
    text, column, inline = (
        [{"prompt": "Hi"}] * 20,
        [{"prompt": "Hi", "images": []}, {"prompt": "<image>", "images": [picture("red")]}],
        [{"prompt": [{"role": "user", "content": [part]}]}],
    )
    for sources in ([text], [column], [inline], [text, column]):
        RLHFDataset(sources, DataConfig(), tokenizer, processor=processor)
    assert judged == [False, True, True, True]
    with pytest.raises(DataError, match="row 0: is a int"):
        RLHFDataset([[3, *text]], DataConfig(), tokenizer, processor=processor)


def test_errors_of_numbers_in_a_processor_name_the_row(tokenizer):
    endless = MediaContent.of("video", [png("red")], 1e-300)
    builder = PromptBuilder(DataConfig(), tokenizer, load_processor("tiny:smolvlm"))
    with pytest.raises(DataError, match=r"row 3: .*the processor refuses the .*OverflowError"):
        builder._tokenize("<video>", [(endless, "row 3: videos[0]")], "row 3")


def test_text_rows_beside_image_rows(tokenizer, processor, write_parquet):
    rows = [{"prompt": "<image>?", "images": [{"bytes": png("red")}]}, {"prompt": "Hi", "images": None}]
    dataset = build(write_parquet(rows), tokenizer, processor)
    assert dataset[1].messages == ({"role": "user", "content": "Hi"},)
    assert dataset[1].media == ()


def test_without_a_column_a_placeholder_is_text(tokenizer):
    prompt = RLHFDataset([[{"prompt": "the <image> tag"}]], DataConfig(), tokenizer)[0]
    assert prompt.messages[0]["content"] == "the <image> tag"


def test_bad_rows(tokenizer, processor):
    for row, message in (
        ({"prompt": "Hi", "images": ["a.png"]}, "prompt has 0 <image> and images holds 1; write one <image> per image"),
        ({"prompt": "<image>", "images": []}, "prompt has 1 <image> and images holds 0"),
        ({"prompt": "<image>", "images": None}, "prompt has 1 <image> and images holds 0"),
        ({"prompt": "<video>", "images": [], "videos": None}, "prompt has 1 <video> and videos holds 0"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "prompt has 1 <image> and images holds 0"),
        ({"prompt": "<image>", "images": ["absent.png"]}, r"images\[0\]: no such file: absent.png"),
        ({"prompt": "<image>", "images": ["x" * 5000]}, r"images\[0\]: 'x+' is not a path \(File name too long\)"),
        ({"prompt": "<image>", "images": [b"not an image"]}, r"images\[0\]: not a readable image"),
        ({"prompt": "<image>", "images": [png("red")[:60]]}, r"images\[0\]: not a readable image"),
        ({"prompt": "<image>", "images": [3]}, r"images\[0\]: a int is not an image; give a path"),
        (
            {"prompt": "<image>", "images": [np.zeros((2, 2))]},
            r"images\[0\]: an array of float64 with the shape \(2, 2",
        ),
        ({"prompt": "<image>", "images": [{"bytes": None}]}, r"images\[0\]: a NoneType is not an image"),
        ({"prompt": "<image>", "images": [{"image": b"", "max_pixels": 0}]}, r"images\[0\]: max_pixels = 0; must be"),
        (
            {"prompt": "<image>", "images": [{"image": b"", "resized_width": 9}]},
            r"images\[0\]: resized_width is not su",
        ),
        ({"prompt": "<video>", "videos": ["absent.mp4"]}, r"videos\[0\]: no such file: absent.mp4"),
        ({"prompt": "<video>", "videos": [[3]]}, r"videos\[0\] frame 0: a int is not an image"),
        ({"prompt": "<video>", "videos": [[]]}, r"videos\[0\]: the video has no frames"),
        ({"prompt": "<video>", "videos": [{"frames": [png("red")], "fps": 0}]}, r"videos\[0\]: fps = 0; must be"),
        (
            {"prompt": "<video>", "videos": [{"frames": [png("red")], "fps": 1e-300}]},
            r"videos\[0\]: fps = 1e-300;",
        ),
        (
            {"prompt": "<image><image>", "images": [picture("red"), picture("red", (2001, 10))]},
            r"images\[1\]: the processor refuses the image \(ValueError: a picture of 2001×10 pixels is too narrow",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": picture("red", (10, 2001))}]}]},
            r"prompt\[0\].content\[0\]: the processor refuses the image",
        ),
        ({"prompt": "<video>", "videos": [picture("red")]}, r"videos\[0\]: one image is not a video"),
    ):
        with pytest.raises(DataError, match=f"dataset object, row 0: {message}"):
            build([row], tokenizer, processor)


def test_images_without_a_processor(tokenizer):
    with pytest.raises(DataError, match=r"row 0: images\[0\]: the model takes only text; use a vision model"):
        build([{"prompt": "<image>", "images": [picture("red")]}], tokenizer, None)


def test_the_models_own_placeholder_in_a_text(tokenizer, processor):
    rows = [{"prompt": "What is <|image_pad|><image>?", "images": [picture("red")]}]
    with pytest.raises(DataError, match=r"row 0: the processor refuses the row .*2 placeholders <.image_pad.> for 1"):
        build(rows, tokenizer, processor)


def test_other_columns(tokenizer, processor):
    prompt = build([{"prompt": "<image>", "photo": picture("red")}], tokenizer, processor, image_key="photo")[0]
    assert colors(prompt) == ["red"]
    assert "photo" not in prompt.columns
