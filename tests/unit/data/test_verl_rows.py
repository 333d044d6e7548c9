"""What datasets for verl and AReaL contain: media inside messages, saved datasets, a limit on rows, other columns."""

from __future__ import annotations

import base64
import dataclasses

import datasets
import fsspec
import pytest
from test_multimodal_rows import build, colors, picture, png

from headwater.config.paths import with_absolute_paths
from headwater.config.schema import Config, DataConfig
from headwater.core.errors import DataError
from headwater.core.requests import ModelResponse
from headwater.data.rlhf_dataset import RLHFDataset
from headwater.rewards.scorers import SCORERS, scorer_of


def data_url(color):
    return f"data:image/png;base64,{base64.b64encode(png(color)).decode()}"


def chat(*parts):
    return [{"role": "user", "content": list(parts)}]


def test_images_inside_messages(tokenizer, processor, tmp_path):
    (tmp_path / "a blue.png").write_bytes(png("blue"))
    path = tmp_path / "a blue.png"
    ways = [
        {"type": "image_url", "image_url": {"url": data_url("blue"), "detail": "low"}},
        {"type": "image_url", "image_url": data_url("blue")},
        {"type": "input_image", "image_url": data_url("blue")},
        {"type": "image_url", "image_url": {"url": path.as_uri()}},
        {"type": "image", "image": path.as_uri()},
        {"type": "image", "image": picture("blue")},
        {"type": "image", "image": {"bytes": png("blue")}},
        {"type": "image", "path": str(path)},
        {"type": "image", "url": data_url("blue")},
        {"type": "image", "base64": base64.b64encode(png("blue")).decode()},
    ]
    rows = [{"prompt": chat(way, {"type": "text", "text": "?"})} for way in ways]
    for prompt in build(rows, tokenizer, processor):
        assert prompt.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "?"}]
        assert colors(prompt) == ["blue"]
        assert prompt.text == "[user]<|image_pad|>?<|end|>[assistant]"


def test_keys_without_a_value_are_accepted(tokenizer, processor, write_parquet):
    """All parts of a Parquet column have the same keys."""
    absent = dict.fromkeys(("image", "image_url", "text", "index", "max_pixels", "nframes", "nonsense"))
    url = {"url": data_url("blue"), "detail": None}
    rows = [
        {"prompt": chat({**absent, **part}, {**absent, "type": "text", "text": "?"}), "images": images}
        for part, images in (
            ({"type": "image_url", "image_url": url}, []),
            ({"type": "image_url", "image_url": url, "text": ""}, []),
            ({"type": "image"}, [{"bytes": png("blue"), "path": None, "nframes": None}]),
            ({"type": "image", "image_url": {"url": None, "detail": None}}, [{"bytes": png("blue"), "path": "a.png"}]),
            ({"type": "image", "index": 0}, [{"bytes": png("blue"), "path": ""}]),
        )
    ]
    for source in (rows, write_parquet(rows)):
        dataset = build(source, tokenizer, processor)
        assert [colors(prompt) for prompt in dataset] == [["blue"]] * len(rows)
        assert {prompt.text for prompt in dataset} == {"[user]<|image_pad|>?<|end|>[assistant]"}


def test_an_image_inside_a_message_has_its_own_limits(tokenizer, processor):
    url = data_url("blue")
    ways = [
        {"type": "image_url", "image_url": {"url": url, "max_pixels": 400}},
        {"type": "image_url", "image_url": {"url": url}, "max_pixels": 400},
        {"type": "image_url", "image_url": url, "max_pixels": 400},
        {"type": "image_url", "image_url": {"url": url, "max_pixels": 400}, "max_pixels": 4000},
        {"type": "image_url", "image_url": {"url": url, "max_pixels": 4000}, "max_pixels": 400},
        {"type": "image", "image": {"bytes": png("blue"), "max_pixels": 400}, "detail": "high"},
        {"type": "image", "base64": url.partition(",")[2], "max_pixels": 400},
    ]
    dataset = build([{"prompt": chat(way)} for way in ways], tokenizer, processor)
    assert [prompt.media[0].content.images()[0].size for prompt in dataset] == [(28, 14)] * len(ways)
    assert [colors(prompt) for prompt in dataset] == [["blue"]] * len(ways)


@pytest.mark.parametrize("key", ["resized_height", "nonsense", "fps", "index", "text", "file_id"])
def test_a_key_of_an_image_that_has_no_effect_is_refused(tokenizer, processor, key):
    more = {key: 56}
    inner = {"url": data_url("blue"), **more}
    for row, place in (
        ({"prompt": "<image>", "images": [{"bytes": png("red"), **more}]}, r"images\[0\]"),
        ({"prompt": chat({"type": "image", "image": picture("red"), **more})}, r"prompt\[0\]\.content\[0\]"),
        ({"prompt": chat({"type": "image_url", "image_url": inner})}, r"prompt\[0\]\.content\[0\]"),
    ):
        with pytest.raises(
            DataError,
            match=rf"row 0: {place}: {key} is not supported; .*known: min_pixels, max_pixels; remove it, or set data\.",
        ):
            build([row], tokenizer, processor)


@pytest.mark.parametrize(
    "key", ["min_frames", "total_pixels", "sample_fps", "nfames", "resized_height", "video_start", "nonsense", "detail"]
)
def test_a_key_of_a_video_that_has_no_effect_is_refused(tokenizer, processor, key):
    frames = [png("red"), png("blue")]
    hint = {"min_frames": "max_frames", "nfames": "max_frames", "total_pixels": "max_pixels"}.get(key)
    meant = rf"did you mean '{hint}'\? " if hint else ""
    for row, place in (
        ({"prompt": "<video>", "videos": [{"video": frames, key: 2}]}, r"videos\[0\]"),
        ({"prompt": chat({"type": "video", "video": frames, key: 2})}, r"prompt\[0\]\.content\[0\]"),
    ):
        with pytest.raises(
            DataError,
            match=rf"row 0: {place}: {key} is not supported; {meant}known: .*max_frames, fps; remove it, or set .*"
            r"data\.max_video_frames for all rows",
        ):
            build([row], tokenizer, processor)


def test_a_part_that_takes_an_image_of_the_column_has_no_settings(tokenizer, processor):
    images = [picture("red"), picture("blue")]
    place = r"row 0: prompt\[0\]\.content\[1\]"
    for part, message in (
        ({"type": "image", "max_pixels": 400}, "max_pixels in a part without its image; write it in the column: "),
        ({"type": "image", "index": 0}, "index = 0, but the images of the column are used in order, .* number 1"),
        ({"type": "image", "imge": "a.png"}, r"imge is not supported; did you mean 'image'\?"),
        ({"type": "image", "text": "A cat"}, "text is not supported"),
    ):
        with pytest.raises(DataError, match=f"{place}: {message}"):
            build([{"prompt": chat({"type": "image"}, part), "images": images}], tokenizer, processor)
    part = {"type": "image", "index": 1}
    row = {"prompt": chat({"type": "image", "index": 0}, part), "images": images}
    assert colors(build([row], tokenizer, processor)[0]) == ["red", "blue"]


def test_images_of_messages_and_of_the_column_keep_the_order_of_the_prompt(tokenizer, processor):
    inline = {"type": "image_url", "image_url": {"url": data_url("blue")}}
    row = {"prompt": chat({"type": "image"}, inline, {"type": "image"}), "images": [picture("red"), data_url("lime")]}
    assert colors(build([row], tokenizer, processor)[0]) == ["red", "blue", "lime"]


def test_what_is_not_supported_is_refused_with_its_place(tokenizer, processor):
    url = "https://example.org/a.png"
    for part, message in (
        ({"type": "image_url", "image_url": {"url": url}}, "is not read over the network"),
        ({"type": "image_url", "image_url": {"url": "file://host/a.png"}}, "is not read over the network"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "is not a data URL in base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,a"}}, "base64 text .* is damaged"),
        ({"type": "image_url"}, "without a URL"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "a video in a data URL"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "'input_audio' is not supported"),
    ):
        rows = [{"prompt": chat({"type": "text", "text": "Hi"}, part)}]
        with pytest.raises(DataError, match=rf"dataset object, row 0: prompt\[0\]\.content\[1\]: .*{message}"):
            build(rows, tokenizer, processor)
    with pytest.raises(DataError, match=r"prompt\[0\].content\[0\]: the model takes only text"):
        build([{"prompt": chat({"type": "image_url", "image_url": data_url("red")})}], tokenizer, None)


def test_remote_media_are_read_only_if_allowed(tokenizer, processor, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path))
    elsewhere = fsspec.filesystem("memory")
    elsewhere.pipe("/pictures/a [1].png", png("blue"))
    rows = [{"prompt": "<image>", "images": ["memory://pictures/a [1].png"]}]
    with pytest.raises(
        DataError, match=r"row 0: images\[0\]: .*not read over the network; .*data.allow_remote_media=true"
    ):
        build(rows, tokenizer, processor)
    assert colors(build(rows, tokenizer, processor, allow_remote_media=True)[0]) == ["blue"]
    assert [path.name for path in (tmp_path / "media").glob("*/*.png")] == ["a [1].png"]
    elsewhere.rm_file("/pictures/a [1].png")
    assert colors(build(rows, tokenizer, processor, allow_remote_media=True)[0]) == ["blue"]
    rows = [{"prompt": "<image>", "images": ["memory://pictures/absent.png"]}]
    with pytest.raises(
        DataError, match=r"row 0: images\[0\]: data source 'memory://pictures/absent.png': no such file"
    ):
        build(rows, tokenizer, processor, allow_remote_media=True)


def test_saved_datasets(tokenizer, tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list([{"prompt": "One?", "source": "digits"}, {"prompt": "Two?", "source": None}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))
    for folder in ("one", "both/train"):
        dataset = build(str(tmp_path / folder), tokenizer, None, data_source_key="source")
        assert [prompt.messages[0]["content"] for prompt in dataset] == ["One?", "Two?"]
        assert [prompt.data_source for prompt in dataset] == ["digits", folder.rpartition("/")[2]]
        assert "source" not in dataset[0].columns
    with pytest.raises(DataError, match=r"holds the splits test, train; name one, for example '.*both/test'"):
        build(str(tmp_path / "both"), tokenizer, None)
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(dataclasses.replace(Config(), data=DataConfig(train=("one",), eval=("arithmetic",))))
    assert config.data.train == (str(tmp_path / "one"),)
    assert config.data.eval == ("arithmetic",)


def test_a_limit_on_rows(tokenizer):
    rows = [{"prompt": f"number {number}" + " long" * 40 * (number == 1)} for number in range(20)]

    def numbers(split="train", seed=0, **settings):
        dataset = RLHFDataset([rows], DataConfig(**settings), tokenizer, split=split, seed=seed)
        return [int(prompt.messages[0]["content"].split()[1]) for prompt in dataset], dataset.num_filtered

    assert numbers(max_train_rows=5, shuffle=False, truncation="left") == ([0, 1, 2, 3, 4], 0)
    assert numbers(max_train_rows=5, shuffle=False, max_prompt_tokens=40) == ([0, 2, 3, 4], 1)
    assert numbers(max_train_rows=5, split="eval")[0] == list(range(20))
    assert numbers(max_eval_rows=3, split="eval", shuffle=False)[0] == [0, 1, 2]
    assert len(numbers(max_train_rows=50)[0]) == 20
    chosen, _ = numbers(max_train_rows=5)
    assert len(chosen) == 5
    assert chosen == sorted(set(chosen)) == numbers(max_train_rows=5)[0]
    assert chosen not in (list(range(5)), numbers(max_train_rows=5, seed=1)[0])


def test_lengths_of_a_response():
    response = ModelResponse((1, 2, 3), (4,), (-0.5,), (0,), "stop")
    assert (response.input_len, response.output_len) == (3, 1)


GEOMETRY = {"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": png("red"), "path": None}]}
GEOMETRY_FEATURES = {"problem": datasets.Value("string"), "answer": datasets.Value("string")}


def check_geometry(prompt):
    assert colors(prompt) == ["red"]
    assert (prompt.data_source, prompt.ground_truth) == ("hiyouga/geometry3k", "3")
    reply = "<think>x is as long as its neighbour.</think> \\boxed{3}"
    score = SCORERS.resolve(scorer_of(prompt.data_source))
    assert score(prompt.data_source, reply, prompt.ground_truth, prompt.extra_info)["score"] == 1.0
    assert score(prompt.data_source, "\\boxed{4}", prompt.ground_truth, prompt.extra_info)["score"] == 0.0


def test_geometry3k_in_verls_layout(tokenizer, processor, tmp_path):
    """What verl's script writes: rows mapped in ``datasets`` and written with ``to_parquet``."""
    rows = datasets.Dataset.from_list([GEOMETRY] * 2).cast(
        datasets.Features({**GEOMETRY_FEATURES, "images": datasets.List(datasets.Image())})
    )

    def to_verl(row, index):
        return {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": f"{row['problem']} Think first, then answer in \\boxed{{}}."}],
            "images": row["images"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"split": "train", "index": index, "answer": row["answer"], "question": row["problem"]},
        }

    path = tmp_path / "train.parquet"
    rows.map(to_verl, with_indices=True, remove_columns=["problem", "answer"]).to_parquet(path)
    dataset = build(str(path), tokenizer, processor)
    assert len(dataset) == 2
    check_geometry(dataset[1])
    assert dataset[1].extra_info["index"] == 1
    assert dataset[1].media[0].content.frames == (png("red"),)


def test_geometry3k_as_the_hub_has_it(tokenizer, processor, tmp_path):
    rows = datasets.Dataset.from_list(
        [GEOMETRY], features=datasets.Features({**GEOMETRY_FEATURES, "images": datasets.List(datasets.Image())})
    )
    rows.save_to_disk(str(tmp_path / "geometry3k"))
    source = {
        "source": str(tmp_path / "geometry3k"),
        "columns": {"prompt": "problem", "ground_truth": "answer"},
        "data_source": "hiyouga/geometry3k",
        "system_prompt": "Think first, then answer in \\boxed{}.",
    }
    config = DataConfig(train=("geometry",), sources={"geometry": source})
    prompt = RLHFDataset(["geometry"], config, tokenizer, processor=processor)[0]
    check_geometry(prompt)
    assert prompt.messages[0]["role"] == "system"
