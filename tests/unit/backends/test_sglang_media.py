"""Images with SGLang: which servers and models may be given them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from player import serving
from safetensors import safe_open

from headwater.backends import BackendContext
from headwater.backends.remote.model import RunModel, model_folder
from headwater.backends.router.member import common_capabilities
from headwater.backends.sglang.engine import SglangEngine, command, with_published_names
from headwater.backends.sglang.wire import NO_FEATURES
from headwater.config.load import load_config
from headwater.core.capabilities import Capabilities, check_features
from headwater.core.errors import ConfigError, RequestError
from headwater.core.media import MediaBlock, MediaContent, PlacedMedia
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.models.device import with_dtype
from headwater.models.load import load_model, load_tokenizer
from headwater.observe.spans import Spans

IMAGE = (PlacedMedia(MediaContent.of("image", [b"encoded"]), (MediaBlock(0, 2),)),)
REQUEST = ModelRequest("r1", (5, 5, 6), SamplingParams(4), rng_key=1, media=IMAGE)


def context(*settings: str, model: str = "tiny:qwen2_5_vl", owns_weights: bool = True) -> BackendContext:
    base = ["rollout.backend=sglang", f"model.path={model}", "model.device=cpu", "data.max_prompt_tokens=64"]
    config = with_dtype(load_config("quickstart", [*base, "rollout.max_new_tokens=16", *settings]).config)
    return BackendContext(config, model, load_tokenizer(model), Spans(), owns_weights=owns_weights)


@contextmanager
def connected(states: list[Mapping[str, Any]], *settings: str, **more: Any) -> Iterator[SglangEngine]:
    """An engine over a server of SGLang 0.5.23 whose processes tell ``states`` about themselves."""
    told = {"version": "0.5.23", "dtype": "float32", "context_length": 128, "device": "cuda", "internal_states": states}
    model = {"model_path": "/weights", "weight_version": "default", "has_image_understanding": True}

    async def answer(asked: web.Request) -> web.Response:
        if asked.method == "POST":
            return web.json_response({"success": True})
        return web.json_response(told if asked.path.endswith("server_info") else model)

    with serving(web.route("*", "/{path:.*}", answer)) as url:
        engine = SglangEngine.connect(url, context(f"rollout.servers=[{url}]", *settings, **more))
        try:
            yield engine
        finally:
            engine.close()


def test_images_are_refused_if_the_server_would_keep_features_of_older_weights() -> None:
    without, off = {"env_vars": {}}, {"env_vars": {**NO_FEATURES}}
    for states in ([{}], [without], [off, without], [{"env_vars": {"SGLANG_VLM_CACHE_SIZE_MB": "100"}}]):
        with connected(states) as engine:
            assert not engine.capabilities.media
            with pytest.raises(RequestError, match=r"SGLANG_VLM_CACHE_SIZE_MB=0 .*learner\.freeze=\[vision\]"):
                engine.check(REQUEST)
            engine.check(ModelRequest("text", (5, 6), SamplingParams(4), rng_key=1))
    for states, settings, owns in (
        ([off, off], (), True),
        ([without], ("learner.freeze=[vision]",), True),
        ([without], ("lora.rank=2", "lora.targets=[q_proj]"), True),
        ([without], (), False),  # this process sends no weights
    ):
        with connected(states, *settings, owns_weights=owns) as engine:
            assert engine.capabilities.media, settings
            assert not engine.capabilities.file_weights, "files that others write have other names"
            engine.check(REQUEST)


def test_servers_that_a_run_starts_keep_no_features() -> None:
    how = command(context("rollout.placement=disaggregated"), Path("/models/one"), ["cuda:0"])
    assert how.environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


@pytest.mark.parametrize("name", ["tiny:qwen2_5_vl", "tiny:qwen3_vl", "tiny:smolvlm"])
def test_it_is_known_whether_the_tower_is_trained(name: str) -> None:
    of_tower = "qkv" if "qwen" in name else "vision_model.encoder.layers.0.self_attn.q_proj"
    model = RunModel.of(context(model=name))
    for expected, *settings in (
        (True,),
        (False, "learner.freeze=[vision]"),
        (False, "lora.rank=2"),
        (False, "lora.rank=2", "lora.targets=[q_proj, down_proj]"),
        (True, "lora.rank=2", f"lora.targets=[q_proj, {of_tower}]"),
    ):
        assert model.trains_vision(context(*settings, model=name).config) is expected, settings
    assert not RunModel.of(context(model="tiny:qwen3")).trains_vision(context(model="tiny:qwen3").config)


def test_weights_are_sent_under_the_names_of_published_files() -> None:
    model = load_model("tiny:qwen2_5_vl", dtype="float32", device="cpu", seed=0)
    update = with_published_names(WeightUpdate.of(3, model.named_parameters()))
    (bucket,) = update.buckets
    with model_folder(context()) as folder, safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(update.shapes) == set(file.keys())
        assert all(tensor.equal(file.get_tensor(name)) for name, tensor in bucket)
    assert [name for name, _ in bucket] == list(update.shapes)


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3"])
def test_vision_models_that_sglang_does_not_have_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"sglang: it does not implement {kind} models itself"):
        SglangEngine.launch(context("rollout.placement=disaggregated", model=f"tiny:{kind}"), ["cpu"])
    with (
        pytest.raises(ConfigError, match=f"sglang: it does not implement {kind} models itself"),
        connected([{"env_vars": NO_FEATURES}], model=f"tiny:{kind}"),
    ):
        pass


def test_one_server_that_takes_no_images_is_named_for_all() -> None:
    can = common_capabilities([Capabilities(media=True), Capabilities(media_problem="it keeps them; use another")])
    assert not can.media
    with pytest.raises(RequestError, match="r1: has images or videos: it keeps them; use another"):
        check_features(REQUEST, can)
