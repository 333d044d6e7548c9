"""Rollouts of a vision model: prompts with pictures, compared with prompts of text of the same length, and with vLLM.

    python benchmarks/vision_throughput.py --shape qwen2.5-vl-3b --sequences 256 --samples 1 8          # GPU
    python benchmarks/vision_throughput.py --shape tiny --sequences 16 --samples 4 --new-tokens 16      # CPU

Every prompt has one picture and some text. Each of ``--sequences`` responses has exactly ``--new-tokens``, and
``--samples`` of them share a prompt. Weights are random. Pictures and texts are new in every run, so reading pictures,
the vision tower and prefill are part of the time. The table also shows how long the pictures of one run take to be
read, by the engine's threads, and by the vision tower alone. ``--vllm-python`` is an interpreter with vLLM, which gets
the same prompts in a separate process; without it, vLLM is not run. ``--profile`` writes where the time of a run goes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_profile import profile
from options import add_work, parser_of
from PIL import Image
from record import write_record
from shapes import default_device, default_dtype, make_prompts
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil
from vllm_side import run_process

from headwater.config.schema import EngineConfig
from headwater.core.media import Media, MediaContent
from headwater.core.requests import ModelRequest, SamplingParams, derive_key
from headwater.engine.engine import Engine
from headwater.engine.tower import make_tower
from headwater.models.load import load_model, load_processor, load_tokenizer
from headwater.models.vision import VisionProcessor
from headwater.models.vision.families import vision_family
from headwater.models.vision.files import files_of

SHAPES = ("qwen2.5-vl-3b", "tiny")
_TINY = "tiny:qwen2_5_vl"
_PATCH = 28
"""Pixels per token, in each direction."""

Prompt = tuple[tuple[int, ...], Media]


@dataclass(frozen=True)
class Result:
    samples_per_prompt: int
    prompt_tokens: int
    media_tokens_per_s: float
    """New tokens per second with pictures."""
    text_tokens_per_s: float
    """New tokens per second with prompts of text of the same length."""
    ratio: float
    media_runs_s: list[float]
    text_runs_s: list[float]
    reading_s: float
    """Reading the pictures of one run, on the engine's threads."""
    tower_s: float
    """The vision tower over the pictures of one run, without anything else."""
    vllm_tokens_per_s: float | None


def build(shape: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, VisionProcessor]:
    if shape == "tiny":
        processor = load_processor(_TINY)
        assert processor is not None
        return load_model(_TINY, dtype=str(dtype).removeprefix("torch."), device=str(device), seed=0), processor
    tokenizer = load_tokenizer(_TINY)
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{text}|>")
        for name, text in (
            ("vision_start", "vision_start"), ("vision_end", "vision_end"),
            ("image", "image_pad"), ("video", "video_pad"),
        )
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
            "rope_parameters": rope, "rms_norm_eps": 1e-6, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
        },
        vision_config={
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
            "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112, "tokens_per_second": 2,
        },
        tie_word_embeddings=True, architectures=["Qwen2_5_VLForConditionalGeneration"], dtype=dtype, **ids,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration(config).to(dtype).eval()
    image_processor = Qwen2VLImageProcessorPil(size={"shortest_edge": _PATCH**2 * 4, "longest_edge": _PATCH**2 * 16384})
    video = {"video_processor_type": "Qwen2VLVideoProcessor"}
    files = files_of(image_processor, "Qwen2_5_VLProcessor", video)
    return model, VisionProcessor(tokenizer, vision_family(config, image_processor, video), files)


def make_picture(num_tokens: int, seed: int) -> MediaContent:
    """A smooth picture as a JPEG file, with as many tokens as the model makes of it."""
    rows = max(side for side in range(1, num_tokens + 1) if num_tokens % side == 0 and side * side <= num_tokens)
    size = (_PATCH * num_tokens // rows, _PATCH * rows)
    colours = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return MediaContent.of("image", [file.getvalue()])


def make_media_prompts(processor: VisionProcessor, num: int, options: argparse.Namespace, seed: int) -> list[Prompt]:
    """Prompts that start with a picture. Start and end of the picture count as text."""
    texts = make_prompts(num, options.text_tokens - 2, 500, seed)
    prompts = []
    for place, text in enumerate(texts):
        content = make_picture(options.image_tokens, 100_000 * seed + place)
        tokens, media = processor.encode("<|vision_start|><|image_pad|><|vision_end|>", [content])
        assert len(tokens) == options.image_tokens + 2, f"the picture has {len(tokens) - 2} tokens"
        prompts.append(((*tokens, *text), media))
    return prompts


def run(engine: Engine, prompts: list[Prompt], samples: int, new_tokens: int, number: int) -> float:
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=1.0, ignore_end=True)
    requests = [
        ModelRequest(f"{number}/{place}/{sample}", tokens, sampling, derive_key(number, place, sample), media=media)
        for place, (tokens, media) in enumerate(prompts)
        for sample in range(samples)
    ]
    started = time.perf_counter()
    responses = engine.generate(requests)
    elapsed = time.perf_counter() - started
    assert all(len(response.output_tokens) == new_tokens for response in responses)
    return elapsed


@torch.inference_mode()
def time_parts(engine: Engine, model: Any, contents: list[MediaContent]) -> tuple[float, float]:
    """Seconds to read pictures that the engine has not seen, and of the tower alone."""
    reader = engine._media
    assert reader is not None
    started = time.perf_counter()
    reader.read_all(contents)
    reading_s = time.perf_counter() - started
    tower = make_tower(model, reader.processor)
    inputs = [reader.processor.inputs(each) for each in contents]
    times = []
    for _ in range(3):
        _wait(model.device)
        started = time.perf_counter()
        for place in range(0, len(contents), 28):
            tower.of_inputs(inputs[place : place + 28])
        _wait(model.device)
        times.append(time.perf_counter() - started)
    return reading_s, min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_vllm(model: Any, processor: VisionProcessor, samples: int, options: argparse.Namespace) -> list[float]:
    """Seconds of every run of vLLM, with new pictures each time."""
    num_prompts = options.sequences // samples

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.config.save_pretrained(folder)
        processor.tokenizer.save_pretrained(folder)
        processor.save(folder)

        def prompts(seed: int) -> list[dict[str, Any]]:
            made = []
            for place, (tokens, media) in enumerate(make_media_prompts(processor, num_prompts, options, seed)):
                path = folder / f"{seed}-{place}.jpg"
                path.write_bytes(media[0].content.frames[0])
                start, end = media[0].blocks[0].start, media[0].end
                # vLLM's processor repeats the placeholder itself.
                made.append({"tokens": [*tokens[: start + 1], *tokens[end:]], "image": str(path)})
            return made

        total = options.image_tokens + options.text_tokens + options.new_tokens
        job = {
            "folder": name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_tokens": total + 64,
            "max_sequences": options.sequences,
            "settings": {"gpu_memory_utilization": 0.5, "limit_mm_per_prompt": {"image": 1, "video": 0}}
            if model.device.type == "cuda"
            else {"enforce_eager": True, "limit_mm_per_prompt": {"image": 1, "video": 0}},
            "reads_pictures": True,
            "cases": [
                {
                    "name": "vision", "samples": samples, "new_tokens": options.new_tokens,
                    "warm_prompts": prompts(999), "runs": [prompts(number + 1) for number in range(options.runs)],
                }
            ],
        }  # fmt: skip
        result = folder / "seconds.json"
        script = Path(__file__).with_name("vllm_generate.py")
        environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
        run_process([options.vllm_python, str(script), str(result)], json.dumps(job), environment)
        seconds: list[float] = json.loads(result.read_text())["seconds"]["vision"]
        return seconds


def run_case(
    engine: Engine,
    model: Any,
    processor: VisionProcessor,
    samples: int,
    vllm_s: list[float] | None,
    options: argparse.Namespace,
) -> Result:
    num_prompts = options.sequences // samples
    length = options.image_tokens + options.text_tokens
    few = min(options.new_tokens, 2 * engine.config.decode_steps + 1)

    def text_prompts(seed: int) -> list[Prompt]:
        return [(tokens, ()) for tokens in make_prompts(num_prompts, length, 500, seed)]

    media_s, text_s = [], []
    run(engine, make_media_prompts(processor, num_prompts, options, 998), samples, few, 998)
    run(engine, text_prompts(997), samples, few, 997)
    for number in range(1, options.runs + 1):
        media_s.append(
            run(
                engine, make_media_prompts(processor, num_prompts, options, number), samples, options.new_tokens, number
            )
        )
        text_s.append(run(engine, text_prompts(500 + number), samples, options.new_tokens, 500 + number))
    fresh = [media[0].content for _, media in make_media_prompts(processor, num_prompts, options, 900 + samples)]
    reading_s, tower_s = time_parts(engine, model, fresh)
    num_new = options.sequences * options.new_tokens
    vllm = None if vllm_s is None else num_new / min(vllm_s)
    return Result(
        samples, length, num_new / min(media_s), num_new / min(text_s), min(text_s) / min(media_s), media_s, text_s,
        reading_s, tower_s, vllm,
    )  # fmt: skip


def write_profile(engine: Engine, processor: VisionProcessor, options: argparse.Namespace) -> None:
    """For the first case: a run with pictures, and one with text to compare it with."""
    samples, parts = options.samples[0], []
    num_prompts = options.sequences // samples

    def pictures(number: int) -> Callable[[], float]:
        prompts = make_media_prompts(processor, num_prompts, options, number)
        return lambda: run(engine, prompts, samples, options.new_tokens, number)

    def text(number: int) -> Callable[[], float]:
        made = make_prompts(num_prompts, options.image_tokens + options.text_tokens, 500, number)
        return lambda: run(engine, [(tokens, ()) for tokens in made], samples, options.new_tokens, number)

    for title, make in (("PICTURES", pictures), ("TEXT", text)):
        parts += [title, profile(engine, make(801), make(802))]
    options.profile.parent.mkdir(parents=True, exist_ok=True)
    options.profile.write_text("\n".join(parts))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="shape of the model; its weights are random")
    parser.add_argument("--sequences", type=int, default=256, help="responses of a run (default 256)")
    parser.add_argument("--samples", type=int, nargs="+", default=[1], help="samples per prompt, one case each")
    parser.add_argument("--image-tokens", type=int, default=0, help="default 512, or 16 with --shape tiny")
    parser.add_argument("--text-tokens", type=int, default=64, help="default 64")
    add_work(parser, new_tokens=256, runs=2)
    parser.add_argument("--vllm-python", help="interpreter of an environment that has vLLM")
    parser.add_argument("--profile", type=Path, help="write where the time of one run goes, by stage and by kernel")
    options = parser.parse_args()
    options.image_tokens = options.image_tokens or (16 if options.shape == "tiny" else 512)
    device = default_device()
    model, processor = build(options.shape, device, default_dtype(device))
    # vLLM first: the memory that the engine takes would be missing.
    vllm_s = {each: run_vllm(model, processor, each, options) for each in options.samples if options.vllm_python}
    settings = EngineConfig(max_sequences=options.sequences, memory_fraction=0.6)
    engine = Engine(model, processor.tokenizer, settings, processor=processor)
    print("samples: tokens/s with pictures, with text, ratio; s to read the pictures, of the tower; tokens/s of vLLM")
    results = []
    for samples in options.samples:
        results.append(run_case(engine, model, processor, samples, vllm_s.get(samples), options))
        one = results[-1]
        vllm = "-" if one.vllm_tokens_per_s is None else f"{one.vllm_tokens_per_s:,.0f}"
        print(
            f"{samples:>8} {one.media_tokens_per_s:>10,.0f} {one.text_tokens_per_s:>10,.0f} {one.ratio:>6.2f} "
            f"{one.reading_s:>8.2f}s {one.tower_s:>7.2f}s {vllm:>10}",
            flush=True,
        )
    if options.profile is not None:
        write_profile(engine, processor, options)
    engine.close()
    write_record(options.out, device, shape=options.shape, results=[asdict(each) for each in results])


if __name__ == "__main__":
    main()
