"""A real vLLM with a vision model: log-probs of prompts with images, after updates, what is refused, exported models.

vLLM's Qwen2.5-VL needs torchvision, which ``make setup-vllm`` installs if it can be made to work beside torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import CUT_DOWN, PROCESS_LIMIT_S, ROOT, headwater, python_of, train_here
from picture_tools import VISION
from transformers import AutoModelForImageTextToText
from vllm_images import ask, assert_logprobs, check_updates, context, picture, request

from headwater.backends.vllm.engine import VllmEngine
from headwater.core.errors import RequestError
from headwater.core.media import MediaBlock, MediaContent, PlacedMedia, rotary_positions
from headwater.models.load import load_processor

PYTHON, IS_INSTALLED = python_of("vllm")


def has_torchvision() -> bool:
    if not IS_INSTALLED:
        return False
    return subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_torchvision(), reason=f"NO VLLM WITH IMAGES: {PYTHON} has no vLLM with torchvision"),
    pytest.mark.xdist_group("vllm"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    launch = ("rollout.placement=disaggregated", f"rollout.launch.python={PYTHON}")
    engine = VllmEngine.launch(context(*launch), ["cpu"])
    yield engine
    engine.close()


def test_logprobs_with_images_are_those_of_the_published_weights(engine: VllmEngine) -> None:
    check_updates(engine)


def test_a_response_with_an_image_continues_after_given_tokens(engine: VllmEngine) -> None:
    asked = request("whole", picture("green"))
    given = replace(asked, request_id="rest", given_tokens=(40, 41, 42))
    (response,) = asyncio.run(ask(engine, given))
    assert response.output_len == asked.sampling.max_new_tokens - 3
    longer = replace(response, input_tokens=(*asked.input_tokens, 40, 41, 42))
    assert_logprobs(asked, longer, seed=engine.get_version())


def test_what_vllm_would_misread_is_refused(engine: VllmEngine) -> None:
    asked = request("refused", picture("red"))
    video = MediaContent.of("video", [picture("red").frames[0]] * 2, 1.0)
    with pytest.raises(RequestError, match="has a video, and this engine takes only images"):
        engine.check(replace(asked, media=(replace(asked.media[0], content=video),)))
    # The model has sampled a placeholder token before the image: vLLM would put the image there.
    pad = asked.input_tokens[asked.media[0].blocks[0].start]
    moved = tuple(item.moved(1) for item in asked.media)
    with pytest.raises(RequestError, match="placeholder token that stands for no image"):
        asyncio.run(ask(engine, replace(asked, input_tokens=(pad, *asked.input_tokens), media=moved)))


def test_vllm_in_this_process_takes_images() -> None:
    script = Path(__file__).with_name("vllm_images.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [PYTHON, script], env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT_S, check=False
    )
    if "NO PACKAGE" in done.stdout:
        pytest.skip(f"{PYTHON} lacks a package of Headwater: {done.stdout.strip()[-200:]}")
    assert done.stdout.strip().endswith("all is well"), done.stdout[-2000:] + done.stderr[-2000:]


def test_frames_of_videos_are_nearly_those_of_torchvision() -> None:
    """vLLM's environment is the one that has torchvision."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, Path(__file__).with_name("video_pixels.py"), "qwen2_5_vl", "qwen3_vl", "smolvlm"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT_S, check=False
    )
    if "NO PACKAGE" in done.stdout:
        pytest.skip(f"{PYTHON} lacks a package of Headwater: {done.stdout.strip()[-200:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    for name, steps in json.loads(done.stdout.splitlines()[-1]).items():
        assert steps["smooth"] < 2.01, name
        assert steps["noise"] < 0.5, name


VIDEOS = """
import base64, io, json, types
import torch
from PIL import Image
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

stream = io.BytesIO()
Image.new("RGB", (28, 28)).save(stream, "PNG")
frames = ",".join([base64.b64encode(stream.getvalue()).decode()] * 40)
read, about = VideoMediaIO(ImageMediaIO()).load_base64("video/jpeg", frames).media

vision = types.SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
model = Qwen2_5_VLForConditionalGeneration
itself = types.SimpleNamespace(config=types.SimpleNamespace(vision_config=vision))
itself.iter_mm_grid_thw = types.MethodType(model.iter_mm_grid_thw, itself)
data = {"video_grid_thw": torch.tensor([3, 4, 4]), "second_per_grid_ts": torch.tensor(1.0)}
video = types.SimpleNamespace(
    modality="video",
    mm_position=types.SimpleNamespace(offset=2),
    data={name: types.SimpleNamespace(data=each) for name, each in data.items()},
)
positions, _ = model.get_mrope_input_positions(itself, [0] * 16, [video])
print("TOLD", json.dumps([len(read), about["fps"], list(GenerateRequest.model_fields), positions.tolist()]))
"""


def test_vllm_still_cannot_be_given_a_video_as_the_learner_reads_it(tmp_path: Path) -> None:
    """The reasons of docs/servers.md. Should one fail with a newer vLLM, videos may no longer have to be refused. The
    positions are no such reason: with the same rate, they are the learner's."""
    (tmp_path / "videos.py").write_text(VIDEOS)
    environment = os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [PYTHON, tmp_path / "videos.py"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=PROCESS_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    num_frames, rate, settings, positions = json.loads(done.stdout.partition("TOLD")[2].splitlines()[0])
    assert (num_frames, rate) == (32, 1.0), "of 40 frames; both are settings of the whole server"
    assert "content_parts" in settings
    assert not {"media_io_kwargs", "mm_processor_kwargs"} & set(settings), "no request can tell its rate"
    block = MediaBlock(2, 12, (3, 2, 2), time_step=2.0)
    ours = rotary_positions(16, (PlacedMedia(MediaContent.of("video", [b"frame"] * 6, 2.0), (block,)),)).tolist()
    assert positions == ours
    assert positions[0][14] == 7, "one after the video's last time"


GENERATE = """
import json, sys
from PIL import Image
from vllm import LLM, SamplingParams

model = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, limit_mm_per_prompt={"video": 0})
sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
prompt = {"prompt_token_ids": json.loads(sys.argv[2]), "multi_modal_data": {"image": Image.open(sys.argv[3])}}
(done,) = model.generate(prompt, sampling)
print("TOKENS", json.dumps(done.outputs[0].token_ids))
"""


def test_an_exported_vision_model_is_loaded_by_vllm(tmp_path: Path) -> None:
    train_here(*VISION, *CUT_DOWN, f"run.root={tmp_path}", "run.name=pictures")
    result = headwater("export", tmp_path / "pictures", "--to", tmp_path / "model")
    assert result.code == 0, result.stderr
    asked = request("exported", picture("green"))
    (tmp_path / "picture.png").write_bytes(asked.media[0].content.frames[0])
    (tmp_path / "generate.py").write_text(f"if __name__ == '__main__':\n{textwrap.indent(GENERATE, '    ')}")
    (block,) = asked.media[0].blocks
    # vLLM makes as many tokens of one placeholder as the picture has.
    prompt = [*asked.input_tokens[: block.start + 1], *asked.input_tokens[block.start + block.length :]]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [PYTHON, tmp_path / "generate.py", tmp_path / "model", json.dumps(prompt), tmp_path / "picture.png"],
        capture_output=True, text=True, check=False, timeout=PROCESS_LIMIT_S,
        env={**os.environ, **settings, "VLLM_HOST_IP": "127.0.0.1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    tokens = json.loads(done.stdout.partition("TOKENS")[2].splitlines()[0])
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    processor = load_processor(str(tmp_path / "model"))
    assert processor is not None
    expected = list(asked.input_tokens)
    for _ in range(8):
        with torch.no_grad():
            logits = model(**processor.model_inputs(expected, asked.media)).logits
        expected.append(int(logits[0, -1].argmax()))
    assert tokens == expected[-8:]
