"""Images in requests: of Headwater's own API, in chats, in SGLang's calls; what is refused, and what clients send."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any
from urllib.request import urlopen

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from engine.engine_parts import LIMIT_S, run, running
from patience import long_enough
from PIL import Image
from tiny import tokenizer

from headwater.backends import BackendContext
from headwater.backends.native.engine import NativeEngine
from headwater.backends.router.engine import RoutedServer, RouterEngine
from headwater.backends.router.member import common_capabilities
from headwater.backends.sglang.engine import SglangEngine
from headwater.chat.render import render_chat
from headwater.config.load import load_config
from headwater.config.schema import EngineConfig
from headwater.core.errors import DataError, RequestError
from headwater.core.media import MediaContent
from headwater.core.protocols import EngineLimits
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.data.media import media_cache
from headwater.engine.engine import Engine
from headwater.models.device import with_dtype
from headwater.models.load import load_model, load_processor, load_tokenizer
from headwater.models.vision.placeholders import collapse
from headwater.models.vision.processor import VisionProcessor
from headwater.observe.spans import Spans
from headwater.serving import media
from headwater.serving.app import build_app
from headwater.serving.errors import ApiError
from headwater.serving.listen import bind, make_runner, url
from headwater.serving.native.media import STORE_BYTES, UNKNOWN_MEDIA
from headwater.serving.native.request import read_request, write_request
from headwater.serving.options import ServerOptions
from headwater.serving.prompt import ModelLimits
from headwater.serving.state import STATE

MODEL = "tiny:qwen2_5_vl"
GREEDY = SamplingParams(6, temperature=0.0, ignore_end=True)
CHAT = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@lru_cache(maxsize=1)
def processor() -> Any:
    return load_processor(MODEL)


def png(colour: str, size: tuple[int, int] = (56, 56)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "PNG")
    return stream.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def bomb(side: int = 20_000) -> bytes:
    """A small file whose header promises 400 million pixels, or another square."""
    data = bytearray(png("red"))
    data[16:24] = side.to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def request(*contents: MediaContent, name: str = "r", **more: Any) -> ModelRequest:
    content = [
        {"type": "text", "text": "Is it "},
        *({"type": "image"} for _ in contents),
        {"type": "text", "text": "?"},
    ]
    text = render_chat(processor().template, [{"role": "user", "content": content}])
    tokens, media = processor().encode(text, contents)
    return ModelRequest(name, tokens, GREEDY, rng_key=5, media=media, **more)


RED, BLUE = (MediaContent.of("image", [png(colour)]) for colour in ("red", "blue"))


def noise(width: int, height: int) -> MediaContent:
    """A picture of another size than those that the model reads."""
    stream = io.BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(0).randbytes(3 * width * height)).save(stream, "PNG")
    return MediaContent.of("image", [stream.getvalue()])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = load_model(MODEL, dtype="float32", device="cpu", seed=0)
    made = Engine(model, load_tokenizer(MODEL), EngineConfig(max_sequences=8), processor=processor())
    yield made
    made.close()


# Headwater's own requests


def limits() -> ModelLimits:
    return ModelLimits(load_tokenizer(MODEL), EngineLimits(516, 128, 128, 32))


def test_a_request_with_images_arrives_as_it_was_sent() -> None:
    sent, store, known = request(RED, BLUE, RED), media_cache(STORE_BYTES), set()
    bodies = [json.loads(json.dumps(write_request(sent, known))) for _ in range(2)]
    assert [["frames" in item for item in body["media"]] for body in bodies] == [[True, True, False], [False] * 3]
    for body in bodies:
        read = read_request(body, limits(), store)
        assert read == sent
        assert read.media[0].content.frames == RED.frames
    with pytest.raises(ApiError) as refusal:
        read_request(bodies[1], limits(), media_cache(STORE_BYTES))
    assert (refusal.value.status, refusal.value.code) == (409, UNKNOWN_MEDIA)


def test_requests_with_equal_images_share_their_bytes() -> None:
    store = media_cache(STORE_BYTES)
    first, second = (read_request(json.loads(json.dumps(write_request(request(RED)))), limits(), store) for _ in "ab")
    assert first.media[0].content is second.media[0].content


def test_a_store_does_not_keep_any_number_of_tiny_contents() -> None:
    store = media_cache(max_bytes=20_000)
    contents = [MediaContent.of("video", [bytes([number])] * 10, 1.0) for number in range(100)]
    for content in contents:
        store.put(content.digest, content)
    assert 10 < sum(store.get(each.digest) is not None for each in contents) < 30


def test_refused_media_are_named() -> None:
    body = json.loads(json.dumps(write_request(request(RED))))

    def changed(**change: Any) -> dict[str, Any]:
        return {**body, "media": [{**body["media"][0], **change}]}

    start = body["media"][0]["blocks"][0][0]
    large = base64.b64encode(bomb(9_000)).decode()
    digest = MediaContent.of("image", [bomb(9_000)]).digest
    whole = changed(frames=[large], digest=digest)["media"]
    cases = [
        (changed(kind="sound"), 'media[0].kind = "sound": must be one of image, video'),
        (changed(digest="0" * 64), "media[0].digest"),
        (changed(frames=["?"]), "media[0].frames[0]: is not base64"),
        (changed(frames=[base64.b64encode(b"text").decode()]), "media[0].frames[0]: not a readable image"),
        (changed(frames=[base64.b64encode(bomb()).decode()]), "media[0].frames[0]: larger than 89478485 pixels"),
        (changed(frames=body["media"][0]["frames"] * 2), "must be a list of 1 to 1 encoded images"),
        (changed(kind="video", frames=[large] * 4), "media[0].frames[3]: the pictures of an item have more than 2684"),
        ({**body, "media": whole * 14}, "media[13].frames[0]: the pictures of a request have more than 1073741824"),
        (changed(kind="video", frames_per_s=1e-300), "media[0].frames_per_s = 1e-300: must be 0, or in 1e-06 to"),
        (changed(blocks=[[start, 4]]), "media[0].blocks[0]"),
        (changed(blocks=[[start, 4, [1, 1, 3], 1.0]]), "the product of the grid"),
        (changed(blocks=[[len(body["input_tokens"]) - 1, 4, [1, 2, 2], 1.0]]), "ends at token"),
        (changed(blocks=[[start, 4, [1, 2, 2], 1.0], [start + 1, 4, [1, 2, 2], 1.0]]), "begins before the end"),
        ({**body, "media": "x"}, 'media = "x": must be a list'),
        (changed(pixels=1), "media[0].pixels: no such field"),
    ]
    for given, message in cases:
        with pytest.raises(ApiError) as refusal:
            read_request(given, limits(), media_cache(STORE_BYTES))
        assert message in str(refusal.value)
    with pytest.raises(ApiError, match="takes only text"):
        read_request(body, limits(), None)


@contextmanager
def served(engine: Engine, **options: Any) -> Iterator[tuple[str, web.Application]]:
    """A server in another thread."""
    loop, chosen = asyncio.new_event_loop(), ServerOptions(MODEL, model_path=MODEL, **options)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    app = build_app(engine, load_tokenizer(MODEL), chosen, processor=processor())
    runner = make_runner(app, chosen)

    def do(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(LIMIT_S)

    with bind("127.0.0.1", 0) as taken:
        do(runner.setup())
        do(web.SockSite(runner, taken).start())
        try:
            yield url(taken), app
        finally:
            do(runner.cleanup())
            loop.call_soon_threadsafe(loop.stop)


def context(address: str, backend: str, **more: Any) -> BackendContext:
    settings = [f"rollout.backend={backend}", f"rollout.servers=[{address}]", f"model.path={MODEL}",
                "data.max_prompt_tokens=64", "rollout.max_new_tokens=16"]  # fmt: skip
    config = with_dtype(load_config("quickstart", settings).config)
    return BackendContext(config, MODEL, load_tokenizer(MODEL), Spans(), owns_weights=False, **more)


async def answers(engine: Any, *requests: ModelRequest) -> list[tuple[int, ...]]:
    return [each.output_tokens for each in await asyncio.gather(*map(engine.agenerate, requests))]


def test_a_client_cannot_discard_the_weights_of_its_server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    can = replace(engine.capabilities, discards_weights=True)  # as on a GPU with fixed addresses
    monkeypatch.setattr(Engine, "capabilities", can)
    with served(engine) as (address, _):
        client = NativeEngine.connect(address, context(address, "native"))
        try:
            assert client.capabilities.media
            assert not client.capabilities.discards_weights
        finally:
            client.close()
    assert not common_capabilities([can]).discards_weights


def test_a_client_sends_each_image_once_and_again_if_the_server_has_forgotten_it(engine: Engine) -> None:
    asked = [request(RED, name="a"), request(BLUE, name="b"), request(RED, name="c"), request(name="d")]
    expected = run(answers(engine, *asked))
    assert len(set(expected)) == 3  # the two colours have the same tokens
    with served(engine) as (address, app):
        client = NativeEngine.connect(address, context(address, "native"))
        router = RouterEngine([RoutedServer("one", client)])
        try:
            assert client.capabilities.media
            assert router.capabilities.media
            assert run(answers(client, *asked)) == expected
            app[STATE].media.clear()
            assert run(answers(router, *asked)) == expected
            rest = replace(asked[0], given_tokens=expected[0][:2])
            assert run(answers(router, rest)) == [expected[0][2:]]
            huge = MediaContent("image", (bytes(70 << 20),), "0" * 64)
            with pytest.raises(RequestError, match=r"70\.0 MiB, and the server takes messages of 64\.0 MiB"):
                client.check(replace(asked[0], media=(replace(asked[0].media[0], content=huge),)))
        finally:
            router.close()


def test_requests_of_a_lost_server_continue_on_another_one_with_their_images(engine: Engine) -> None:
    asked = [request(RED, name="a"), request(BLUE, name="b"), request(RED, BLUE, name="c"), request(RED, name="d")]
    expected = run(answers(engine, *asked))

    async def scenario(router: RouterEngine, lose: Any) -> list[tuple[int, ...]]:
        await asyncio.to_thread(engine.pause)
        waiting = asyncio.create_task(answers(router, *asked))
        async with asyncio.timeout(LIMIT_S):
            while engine.status().num_waiting + engine.status().num_running < len(asked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.to_thread(lose)
            await asyncio.to_thread(engine.resume)
            return await waiting

    with ExitStack() as first, served(engine) as (address, app):
        lost, _ = first.enter_context(served(engine))
        members = [
            RoutedServer(name, NativeEngine.connect(each, context(each, "native", is_one_of_many=True)))
            for name, each in (("lost", lost), ("stays", address))
        ]
        router = RouterEngine(members)
        try:
            assert run(scenario(router, first.close)) == expected
            assert app[STATE].media.get(RED.digest) is not None
            assert router.status().metrics["router_num_requests_moved"] >= 1
        finally:
            router.close()


def test_the_sglang_backend_passes_images_on_to_a_server_with_its_calls(engine: Engine) -> None:
    asked = [
        request(RED, BLUE, name="a"),
        request(BLUE, name="b"),
        request(name="c"),
        request(noise(150, 90), name="d"),
    ]
    expected = run(answers(engine, *asked))
    with served(engine) as (address, _):
        client = SglangEngine.connect(address, context(address, "sglang"))
        try:
            assert client.capabilities.media
            assert run(answers(client, *asked)) == expected
            rest = replace(asked[0], given_tokens=expected[0][:2])
            assert run(answers(client, rest)) == [expected[0][2:]]
        finally:
            client.close()


# Chats


def ask(engine: Engine, path: str, body: Any, *, is_vision: bool = True, **options: Any) -> tuple[int, Any]:
    async def scenario() -> tuple[int, Any]:
        words = load_tokenizer(MODEL) if is_vision else tokenizer()
        app = build_app(engine, words, ServerOptions("m", **options), processor=processor() if is_vision else None)
        async with TestClient(TestServer(app)) as client, client.post(path, json=body) as reply:
            return reply.status, await reply.json()

    return run(scenario())


def chat(*urls: Any, **more: Any) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": each} for each in urls]
    content = [{"type": "text", "text": "Is it "}, *images, {"type": "text", "text": "?"}]
    return {**CHAT, "messages": [{"role": "user", "content": content}], **more}


def test_chats_with_images_are_answered_as_the_engine_answers(engine: Engine) -> None:
    asked = request(RED, BLUE)
    (expected,) = run(answers(engine, asked))
    status, body = ask(engine, "/v1/chat/completions", chat({"url": data_url(png("red"))}, data_url(png("blue"))))
    assert (status, body["choices"][0]["token_ids"]) == (200, list(expected))
    assert body["prompt_token_ids"] == list(asked.input_tokens)
    assert body["usage"]["prompt_tokens"] == len(asked.input_tokens)

    parts = [{"type": "input_text", "text": "Is it "},
             *({"type": "input_image", "image_url": data_url(png(each)), "detail": "auto"} for each in ("red", "blue")),
             {"type": "input_text", "text": "?"}]  # fmt: skip
    asked_again = {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 6}
    _, whole = ask(engine, "/v1/chat/completions", chat(data_url(png("red")), data_url(png("blue")), ignore_eos=False))
    status, body = ask(engine, "/v1/responses", asked_again)
    assert (status, body["output"][0]["content"][0]["text"]) == (200, whole["choices"][0]["message"]["content"])

    parts[1]["resized_height"] = 28
    status, body = ask(engine, "/v1/responses", asked_again)
    assert (status, "resized_height is not supported" in body["error"]["message"]) == (400, True)

    status, body = ask(engine, "/tokenize", {"messages": chat(data_url(png("red")))["messages"]})
    assert (status, body["tokens"]) == (200, list(request(RED).input_tokens))


def test_refused_images_are_named(engine: Engine) -> None:
    where = "messages[0].content[1]"
    cases = [
        (data_url(b"text"), f"{where}: not a readable image"),
        ("data:image/png;base64,????", f"{where}: the base64 text of the data URL is damaged"),
        ("data:image/png,abc", f"{where}: 'data:image/png' is not a data URL in base64"),
        (data_url(bomb()), f"{where}: larger than 89478485 pixels"),
        (data_url(png("red")[:60]), f"{where}: not a readable image"),
        ("https://example.com/a.png", f"{where}: https://example.com/a.png is not downloaded; send the image as a"),
        ("/etc/passwd", f"{where}: '/etc/passwd' is not read from the disk"),
        ("file:///etc/passwd", f"{where}: '/etc/passwd' is not read from the disk"),
        (7, f"{where}: a int is not an image"),
        ({"detail": "low"}, where),
        ({"url": data_url(png("red")), "nonsense": 1}, f"{where}: nonsense is not supported; known: min_pixels"),
    ]
    for image, message in cases:
        status, body = ask(engine, "/v1/chat/completions", chat(image))
        assert status == 400, body
        assert message in body["error"]["message"]
    text = [{"type": "text", "text": "<|image_pad|>"}, {"type": "image_url", "image_url": data_url(png("red"))}]
    status, body = ask(engine, "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]})
    assert status == 400
    assert "2 placeholders <|image_pad|> for 1 images" in body["error"]["message"]
    sound = [{"type": "input_audio", "input_audio": {}}]
    status, body = ask(engine, "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": sound}]})
    assert (status, "this server accepts text, images and videos" in body["error"]["message"]) == (400, True)
    status, body = ask(engine, "/v1/chat/completions", chat(*[data_url(png("red"))] * 257))
    assert (status, "257 images and videos" in body["error"]["message"]) == (400, True)


def test_a_text_model_refuses_images() -> None:
    with running() as text_engine:
        status, body = ask(text_engine, "/v1/chat/completions", chat(data_url(png("red"))), is_vision=False)
        assert status == 400
        assert 'messages[0].content[1].type = "image_url": this server accepts only text' in body["error"]["message"]
        status, body = ask(text_engine, "/generate", {"text": "a", "image_data": data_url(png("red"))}, is_vision=False)
        assert (status, "image_data: this server's model or engine reads only text" in body["error"]["message"]) == (
            400,
            True,
        )
        status, body = ask(
            text_engine,
            "/headwater/generate",
            {**write_request(request(RED)), "input_tokens": [5] * 12},
            is_vision=False,
        )
        assert (status, body["error"]["code"]) == (501, "unsupported_by_engine")


def test_images_are_downloaded_only_if_the_server_may(engine: Engine, tmp_path) -> None:
    async def scenario(**options: Any) -> tuple[int, Any]:
        pictures = web.Application()

        async def send(_: web.Request) -> web.Response:
            return web.Response(body=png("red"), content_type="image/png")

        async def elsewhere(_: web.Request) -> web.Response:
            raise web.HTTPFound("file:///etc/passwd")

        pictures.add_routes([web.get("/red.png", send), web.get("/away.png", elsewhere)])
        app = build_app(engine, load_tokenizer(MODEL), ServerOptions("m", **options), processor=processor())
        async with TestServer(pictures) as source, TestClient(TestServer(app)) as client:
            statuses = []
            for name in ("red.png", "red.png", "away.png", "none.png"):
                url = {"url": str(source.make_url(name)), "detail": "low"}
                image = {**url, "max_pixels": 28 * 28} if statuses else url
                async with client.post("/v1/chat/completions", json=chat(image)) as reply:
                    statuses.append((reply.status, await reply.json()))
            return statuses

    (found, red), (small, smaller), (redirected, away), (missing, none) = run(scenario(fetches_media=True))
    assert (found, small, redirected, missing) == (200, 200, 400, 400)
    assert red["prompt_token_ids"] == list(request(RED).input_tokens)
    assert len(smaller["prompt_token_ids"]) < len(red["prompt_token_ids"])
    assert "Redirection to url 'file:" in away["error"]["message"]
    assert "404" in none["error"]["message"]
    assert [status for status, _ in run(scenario())] == [400] * 4


def test_a_download_that_never_ends_is_given_up(monkeypatch) -> None:
    async def scenario(limit_s: float) -> None:
        async def drip(asked: web.Request) -> web.StreamResponse:
            reply = web.StreamResponse()
            await reply.prepare(asked)
            with suppress(ConnectionError):
                while True:
                    await reply.write(b"x")
                    await asyncio.sleep(0.05)
            return reply

        pictures = web.Application()
        pictures.add_routes([web.get("/slow.png", drip)])
        async with TestServer(pictures) as source:
            with pytest.raises(DataError, match=rf"slow\.png cannot be downloaded \(more than {limit_s:g} s\)"):
                await asyncio.to_thread(media._download, str(source.make_url("/slow.png")), "part")

    def check(limit_s: float) -> None:
        monkeypatch.setattr(media, "_DOWNLOAD_LIMIT_S", limit_s)
        run(scenario(limit_s))

    long_enough(check, 0.3, 10.0)  # a single byte must not take that long either


# SGLang's calls


def test_generate_takes_images_with_text_and_with_token_ids(engine: Engine) -> None:
    asked = [request(RED, BLUE), request(BLUE)]
    expected = run(answers(engine, *asked))
    short = [collapse(each.input_tokens, each.media, processor()) for each in asked]
    images = [data_url(png("red")), base64.b64encode(png("blue")).decode()]
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    content = [{"type": "text", "text": "Is it "}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]
    text = render_chat(processor().template, [{"role": "user", "content": content}])
    for prompt in ({"input_ids": short[0]}, {"text": text}):
        status, body = ask(engine, "/generate", {**prompt, "image_data": images, "sampling_params": params})
        assert (status, body["output_ids"]) == (200, list(expected[0]))
        assert body["meta_info"]["prompt_tokens"] == len(asked[0].input_tokens)
    batch = {"input_ids": short, "image_data": [images, images[1]], "sampling_params": params}
    status, bodies = ask(engine, "/generate", batch)
    assert (status, [body["output_ids"] for body in bodies]) == (200, [list(each) for each in expected])
    cases = [
        ({"input_ids": short[1], "image_data": images}, "image_data: the tokens have 1 placeholders for 2 images"),
        ({"input_ids": short, "image_data": [images]}, "image_data: a list of 1 for 2 prompts"),
        ({"input_ids": short, "image_data": images[0]}, "image_data: one image for 2 prompts"),
        ({"input_ids": short[1], "image_data": "/etc/passwd"}, "the base64 text of the data URL is damaged"),
        ({"input_ids": short[1], "image_data": "file:///etc/passwd"}, "is not read from the disk"),
        ({"input_ids": short[1], "image_data": 7}, "image_data[0] = 7: must be a data URL"),
        ({"text": "a", "image_data": images[0]}, "0 placeholders <|image_pad|> for 1 images"),
    ]
    for change, message in cases:
        status, body = ask(engine, "/generate", {**change, "sampling_params": params})
        assert (status, message in body["error"]["message"]) == (400, True), body


def test_generate_takes_a_jpeg_in_base64_alone(engine: Engine) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (56, 56), "blue").save(stream, "JPEG")
    (short,) = (collapse(each.input_tokens, each.media, processor()) for each in [request(BLUE)])
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    replies = [
        ask(engine, "/generate", {"input_ids": short, "image_data": image, "sampling_params": params})
        for image in (base64.b64encode(stream.getvalue()).decode(), data_url(stream.getvalue(), "image/jpeg"))
    ]
    assert [status for status, _ in replies] == [200, 200]
    assert replies[0][1]["output_ids"] == replies[1][1]["output_ids"]


def test_the_processors_tokenizer_is_used_before_threads_share_it(engine: Engine) -> None:
    words = load_tokenizer(MODEL)
    own = VisionProcessor(words, processor().family)
    words.backend_tokenizer.enable_truncation(5)
    words.backend_tokenizer.enable_padding()
    build_app(engine, load_tokenizer(MODEL), ServerOptions("m"), processor=own)
    # Changing these later fails with "Already borrowed" while another thread uses the tokenizer.
    assert words.backend_tokenizer.truncation is None
    assert words.backend_tokenizer.padding is None


def test_the_server_tells_whether_it_takes_images(engine: Engine) -> None:
    with served(engine) as (address, _):
        info = json.load(urlopen(f"{address}/get_server_info"))
    assert info["capabilities"]["media"] is True
    assert info["max_body_bytes"] == 64 << 20
