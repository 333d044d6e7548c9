"""Vision models as folders, and our processor against the processors of transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import parse
from test_vision_models import NAMES, assembled_logits, model_of, picture, processor_of, question, video
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from headwater.cli.export import _write_model as write_model
from headwater.core.errors import ModelError
from headwater.core.media import MediaContent, rotary_positions
from headwater.models.load import load_model, load_part, load_processor, load_tokenizer, save_model
from headwater.models.memory_sizes import ModelSize
from headwater.models.save import WeightsToSave
from headwater.models.vision import families
from headwater.models.vision.frames import fitted_size
from headwater.models.vision.idefics import in_words

SIZES = [(int(h), int(w)) for h, w in np.random.default_rng(0).integers(14, 400, (40, 2))]
CLASSES = {
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "smolvlm": SmolVLMProcessor,
    "idefics3": Idefics3Processor,
}


def metadata(content: MediaContent) -> Any:
    indices, rate = list(range(len(content.frames))), content.frames_per_s
    times = [index / rate for index in indices]
    return SimpleNamespace(
        fps=rate, sampled_fps=rate, frames_indices=indices, timestamps=times, duration=len(indices) / rate
    )


def transformers_processor(name: str, *videos: MediaContent) -> Any:
    """The processor of the whole model, which refuses to be built without the video processor of torchvision.

    In its place is one that returns our tensors of ``videos``.
    """
    own = processor_of(name)

    class VideoProcessor:
        merge_size = temporal_patch_size = 2

        def __call__(self, given: Any, **options: Any) -> dict[str, Any]:
            assert len(given) == len(videos)
            made = own.family.joined([own.inputs(each) for each in videos])
            return {**made, "video_metadata": [metadata(each) for each in videos]}

    class Processor(CLASSES[name]):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            del argument_name, argument

    arguments = {} if name == "idefics3" else {"video_processor": VideoProcessor()}
    extra = {} if name.startswith("qwen") else {"image_seq_len": 4}
    return Processor(image_processor=own.family.image_processor, tokenizer=own.tokenizer, **arguments, **extra)


@pytest.fixture(autouse=True)
def _number_words(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package of this name need not be installed.
    monkeypatch.setattr(processing_smolvlm, "num2words", in_words)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_tensors_are_those_of_transformers(name: str) -> None:
    contents = [picture(56, 56), picture(84, 30, seed=1)]
    text = question(name, 2)
    expected = transformers_processor(name)(
        images=[each.images()[0] for each in contents], text=[text], return_tensors="pt", add_special_tokens=False
    )
    tokens, media = processor_of(name).encode(text, contents)
    made = processor_of(name).model_inputs(tokens, media)
    made.pop("position_ids", None)
    assert list(tokens) == expected["input_ids"][0].tolist()
    assert made.keys() == set(expected) - {"attention_mask", "pixel_attention_mask"}
    for key, tensor in made.items():
        torch.testing.assert_close(tensor, expected[key], check_dtype=False, atol=0, rtol=0)
    assert bool(torch.as_tensor(expected.get("pixel_attention_mask", 1)).all())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("num_frames", [4, 5])
@torch.no_grad()
def test_videos_have_the_tokens_and_positions_of_transformers(name: str, num_frames: int) -> None:
    # Versions before 5.19 round the seconds between two pairs of frames down.
    rate = 1.5 if parse(transformers.__version__) >= parse("5.19") else 1.0
    content, still = video(num_frames, 56, 60, frames_per_s=rate), picture(56, 56)
    processor, model = processor_of(name), model_of(name)
    text = "Look: <|vision_start|><|video_pad|><|vision_end|> or <|vision_start|><|image_pad|><|vision_end|>?"
    tokens, media = processor.encode(text, [still, content])
    assert [item.content.kind for item in media] == ["video", "image"]
    # A start and an end around every frame replace those of the whole video, as in the model's training.
    given = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>") if name == "qwen3_vl" else text
    expected = transformers_processor(name, content)(
        images=still.images(), videos=[content.images()], text=[given], return_tensors="pt", add_special_tokens=False
    )
    assert list(tokens) == expected["input_ids"][0].tolist()
    made = processor.model_inputs(tokens, media)
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    theirs, _ = model.model.get_rope_index(**{key: made[key] for key in names if key in made})
    ours, theirs, end = torch.from_numpy(rotary_positions(len(tokens), media)), theirs[:, 0], media[0].end
    assert ours[:, :end].tolist() == theirs[:, :end].tolist()
    # After a video of Qwen2.5-VL, transformers 5 continues among its times, and not after its largest position.
    after = theirs[:, end:] - theirs[0, end] + ours[:, :end].max() + 1
    assert ours[:, end:].tolist() == after.tolist()
    assert name == "qwen2_5_vl" or after.tolist() == theirs[:, end:].tolist()
    assert made["mm_token_type_ids"].tolist() == expected["mm_token_type_ids"].tolist()
    torch.testing.assert_close(assembled_logits(name, tokens, media), model(**made).logits, atol=1e-5, rtol=1e-5)


def test_the_time_of_qwen2_5_vl_counts_seconds() -> None:
    _, (item,) = processor_of("qwen2_5_vl").encode("<|video_pad|>", [video(6, 56, 56, frames_per_s=0.5)])
    # Two frames at once are 4 seconds, of 4 positions each.
    assert item.blocks[0].grid == (3, 2, 2)
    assert item.blocks[0].time_step == 16


def test_frames_of_smolvlm_are_whole_pictures_with_their_times() -> None:
    content = video(3, 56, 56, frames_per_s=0.1)
    processor = processor_of("smolvlm")
    tokens, (item,) = processor.encode("<video>", [content])
    made = {**processor.inputs(content), "video_metadata": [metadata(content)]}
    expected = transformers_processor("smolvlm").replace_video_token(made, 0)
    assert list(tokens) == processor.tokenizer.encode(expected, add_special_tokens=False)
    assert "three frames from a 0:00:30" in expected
    assert [block.length for block in item.blocks] == [4, 4, 4]
    with pytest.raises(ValueError, match="this model takes no videos"):
        processor_of("idefics3").encode("", [content])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_are_grouped_as_the_tower_reads_them(name: str) -> None:
    content = video(3, 56, 56, frames_per_s=1.0)
    made = processor_of(name).inputs(content)["pixel_values_videos"]
    alone = [processor_of(name).inputs(type(content).of("image", [frame]))["pixel_values"] for frame in content.frames]
    first, second, third = (each.view(16, 3, 2, 14 * 14) for each in alone)
    groups = made.view(2, 16, 3, 2, 14 * 14)
    assert torch.equal(groups[0], torch.stack([first[:, :, 0], second[:, :, 0]], 2))
    assert torch.equal(groups[1], third)


@pytest.mark.parametrize("name", NAMES)
def test_the_header_of_a_picture_tells_its_tokens(name: str) -> None:
    family = processor_of(name).family
    for height, width in SIZES[:12]:
        content = picture(width, height)
        num_tokens = sum(piece.length for piece in family.pieces(content) if not isinstance(piece, str))
        inputs = family.inputs(content)
        if "image_grid_thw" in inputs:
            assert num_tokens == int(inputs["image_grid_thw"].prod()) // 4
        else:
            assert num_tokens == 4 * inputs["pixel_values"].shape[1]


def test_pictures_are_scaled_as_transformers_does_it() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    for size in SIZES:
        limits = {"min_pixels": 56 * 56, "max_pixels": 150 * 150}
        assert fitted_size(size, factor=28, **limits) == smart_resize(*size, factor=28, **limits)
    with pytest.raises(ValueError, match="a picture of 2001×10 pixels is too narrow"):
        fitted_size((10, 2001), factor=28, min_pixels=1, max_pixels=10**9)


def test_frames_of_different_sizes_are_not_stretched() -> None:
    frames = [picture(*size).frames[0] for size in ((56, 56), (280, 28))]
    with pytest.raises(ValueError, match="frame 1 of a video has 280×28 pixels, and frame 0 has 56×56"):
        processor_of("qwen2_5_vl").family.inputs(MediaContent.of("video", frames))


def test_numbers_in_words() -> None:
    numbers = (0, 7, 12, 20, 42, 100, 231)
    expected = ["zero", "seven", "twelve", "twenty", "forty-two", "one hundred", "two hundred and thirty-one"]
    assert [in_words(number) for number in numbers] == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_has_its_processor(name: str, tmp_path: Path) -> None:
    model, processor = model_of(name), processor_of(name)
    changed = {key: (each.detach() + 1).to(torch.bfloat16) for key, each in model.named_parameters()}
    weights = WeightsToSave(
        {key: tuple(each.shape) for key, each in changed.items()},
        dict.fromkeys(changed, torch.bfloat16),
        iter(changed.items()),
    )
    with pytest.raises(ModelError, match=r"cannot save the vision model to .* without its processor"):
        save_model(model, processor.tokenizer, tmp_path / "model", weights)
    folder = save_model(model, processor.tokenizer, tmp_path / "model", weights, processor)
    own = load_model(str(folder), dtype="auto", device="cpu", seed=0)
    for loaded in (own, AutoModelForImageTextToText.from_pretrained(folder)):
        for key, each in loaded.named_parameters():
            assert torch.equal(each.to(torch.bfloat16), changed[key]), key
    read = load_processor(str(folder))
    assert read is not None
    content, text = picture(84, 56), question(name, 1)
    assert read.encode(text, [content]) == processor.encode(text, [content])
    assert torch.equal(read.inputs(content)["pixel_values"], processor.inputs(content)["pixel_values"])
    assert read.files == processor.files
    assert read.template.chat_template == processor.template.chat_template


@pytest.mark.skipif(
    find_spec("torchvision") is None and parse(transformers.__version__) < parse("5.19"),
    reason="this version of transformers needs torchvision to load any image processor by AutoProcessor",
)
def test_transformers_reads_the_saved_processor(tmp_path: Path) -> None:
    # Those of the other models cannot be built without torchvision.
    processor = processor_of("idefics3")
    folder = save_model(model_of("idefics3"), processor.tokenizer, tmp_path / "model", processor=processor)
    read = AutoProcessor.from_pretrained(folder)
    assert isinstance(read, Idefics3Processor)
    content, text = picture(84, 56), question("idefics3", 1)
    made = read(images=[content.images()[0]], text=[text], return_tensors="pt", add_special_tokens=False)
    assert made["input_ids"][0].tolist() == list(processor.encode(text, [content])[0])
    assert torch.equal(made["pixel_values"], processor.inputs(content)["pixel_values"])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm"])
def test_a_rank_reads_its_part_of_the_tower(name: str, tmp_path: Path) -> None:
    model, processor = model_of(name), processor_of(name)
    folder = save_model(model, processor.tokenizer, tmp_path / "model", processor=processor)
    skeleton, files = load_part(str(folder), dtype="float32", seed=0)
    assert files is not None
    assert all(each.is_meta for each in skeleton.parameters())
    parameters = {key: torch.empty(each.shape) for key, each in skeleton.named_parameters()}
    buffers = dict(skeleton.named_buffers())
    files.read(parameters, buffers)
    for read, loaded in ((parameters, model.named_parameters()), (buffers, model.named_buffers())):
        for key, each in loaded:
            assert torch.equal(read[key], each), key


def test_a_folder_without_an_image_processor(tmp_path: Path) -> None:
    processor = processor_of("qwen2_5_vl")
    folder = save_model(model_of("qwen2_5_vl"), processor.tokenizer, tmp_path / "model", processor=processor)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=f"{folder}: cannot use its image processor"):
        load_processor(str(folder))


@pytest.mark.parametrize("kind", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"])
def test_files_in_the_layout_of_published_models(kind: str, tmp_path: Path) -> None:
    processor = processor_of("qwen2_5_vl")
    folder = save_model(model_of("qwen2_5_vl"), processor.tokenizer, tmp_path / "model", processor=processor)
    for name in ("processor_config.json", "video_preprocessor_config.json"):
        (folder / name).unlink()
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings.update(image_processor_type=kind, min_pixels=28 * 28, max_pixels=56 * 56)
    del settings["size"]
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    template = "{{ messages[0].content }}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    read = load_processor(str(folder))
    assert read is not None
    assert type(read.family.image_processor).__name__ == "Qwen2VLImageProcessorPil"
    assert read.template.chat_template == template
    text = "<|image_pad|><|video_pad|>"
    _, (still, moving) = read.encode(text, [picture(200, 200), video(2, 200, 200, frames_per_s=1.0)])
    assert (still.num_tokens, moving.num_tokens) == (4, 4)
    copy = save_model(model_of("qwen2_5_vl"), read.tokenizer, tmp_path / "copy", processor=read)
    again = load_processor(str(copy))
    assert again is not None
    assert again.template.chat_template == template
    assert again.encode(text, [still.content, moving.content]) == read.encode(text, [still.content, moving.content])


def _as_published(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` with the keys that the authors of the model have written, for an older transformers."""
    if name.startswith("qwen"):
        text = config["text_config"]
        rope = text.pop("rope_parameters")
        section = {"mrope_section": rope["mrope_section"]}
        text["rope_theta"] = rope["rope_theta"]
        if name == "qwen3_vl":
            text["rope_scaling"] = {"mrope_interleaved": True, "rope_type": "default", **section}
            return config
        # The settings of the language model are not in a section of their own.
        del config["text_config"]
        config["vision_config"].update(in_chans=3, spatial_patch_size=config["vision_config"]["patch_size"])
        return {**text, **config, "rope_scaling": {"type": "mrope", **section}, "use_sliding_window": False}
    config["vision_config"].update(
        size={"longest_edge": 112}, max_image_size={"longest_edge": 56}, use_base_siglip=False
    )
    config["text_config"]["rope_theta"] = config["text_config"].pop("rope_parameters")["rope_theta"]
    return {**config, "use_reentrant_checkpointing": False, "vocab_size": config["text_config"]["vocab_size"]}


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_config_as_the_authors_have_written_it(name: str, tmp_path: Path) -> None:
    processor = processor_of(name)
    folder = save_model(model_of(name), processor.tokenizer, tmp_path / "model", processor=processor)
    config = _as_published(name, json.loads((folder / "config.json").read_text()))
    config["torch_dtype"] = config.pop("dtype", "float32")
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(str(folder), dtype="float32", device="cpu", seed=1)
    tokens, media = load_processor(str(folder)).encode(question(name, 1), [picture(56, 84)])  # type: ignore[union-attr]
    expected = assembled_logits(name, tokens, media)
    torch.testing.assert_close(assembled_logits(name, tokens, media, model), expected, atol=0, rtol=0)
    assert ModelSize.read(str(folder)) == ModelSize.of(model_of(name))


@pytest.mark.parametrize("missing", ["PIL", "transformers"])
def test_what_a_picture_cannot_be_read_with_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(name: str) -> None:
        raise ImportError("this class needs the torchvision library")

    if missing == "PIL":
        monkeypatch.setattr(families, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(families, "import_module", cannot)
    expected = "headwater.vision" if missing == "PIL" else "needs the torchvision library.; install a version"
    with pytest.raises(ModelError, match=expected):
        load_processor("tiny:qwen2_5_vl")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    processor = processor_of("qwen2_5_vl")
    folder = save_model(model_of("qwen2_5_vl"), load_tokenizer("tiny:qwen3"), tmp_path / "model", processor=processor)
    with pytest.raises(ModelError, match=r"<\|image_pad\|> is not token 514 \(image_token_id in config.json\)"):
        load_processor(str(folder))


def test_an_image_processor_of_another_model_is_refused(tmp_path: Path) -> None:
    processor = processor_of("smolvlm")
    folder = save_model(model_of("smolvlm"), processor.tokenizer, tmp_path / "model", processor=processor)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["image_processor_type"] = "CLIPImageProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="of type CLIPImageProcessor are not supported for smolvlm models; use"):
        load_processor(str(folder))


def test_an_export_in_another_type_has_its_processor(tmp_path: Path) -> None:
    processor = processor_of("qwen2_5_vl")
    folder = save_model(model_of("qwen2_5_vl"), processor.tokenizer, tmp_path / "model", processor=processor)
    exported = tmp_path / "exported"
    exported.mkdir()
    write_model(folder, exported, "bfloat16")
    read = load_processor(str(exported))
    assert read is not None
    assert read.files == processor.files
    weights = load_model(str(exported), dtype="float32", device="cpu", seed=0).state_dict()
    for key, each in model_of("qwen2_5_vl").state_dict().items():
        assert torch.equal(weights[key], each.to(torch.bfloat16).float()), key
