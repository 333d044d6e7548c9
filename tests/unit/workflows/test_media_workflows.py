"""Workflows of all kinds with images: tools that return them, agents that send them, classes of verl and AReaL."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from workflows import pictures
from workflows.pictures import answer, content, episode_of, picture, png, processor, prompt, watched

from headwater.chat.parsers import make_parser
from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.errors import DataError, RolloutFailed
from headwater.core.tool_calls import ToolCall
from headwater.data.media import MediaSettings, load_image
from headwater.models.load import load_processor
from headwater.serving.media import MAX_ITEMS
from headwater.tools.base import ToolResponse
from headwater.tools.results import BadResult, read_result
from headwater.tools.toolbox import Toolbox
from headwater.workflows import Episode
from headwater.workflows.adapters import areal, verl
from headwater.workflows.adapters.areal_workflow import ArealWorkflow
from headwater.workflows.adapters.pictures import ClassProcessor, Pictures
from headwater.workflows.adapters.verl_agents import SingleTurnAgentLoop, ToolAgentLoop
from headwater.workflows.adapters.verl_loop import VerlWorkflow
from headwater.workflows.agents.api import answer_call
from headwater.workflows.agents.session import Session, SessionRules
from headwater.workflows.tool_agent import ToolAgentWorkflow

CALL = '<tool_call>{"name": "zoom", "arguments": {"side": 56}}</tool_call>'
SETTING = "rollout.workflow = x.py:X"


def zoom(side: int) -> Any:
    """Show a part of the picture.

    Args:
        side: Width and height in pixels.
    """
    return ToolResponse("A part.", reward=0.5, image=picture("blue", (side, side)))


def colors(media) -> list[tuple[int, ...]]:
    return [item.content.images()[0].getpixel((0, 0)) for item in media]


RED, BLUE = (255, 0, 0), (0, 0, 255)


def tool_episode(*answers: tuple[int, ...], media: MediaSettings | None, **fields) -> Episode:
    tokenizer = processor().tokenizer
    box = Toolbox(ToolsConfig(), SandboxConfig(), tokenizer, [zoom], media=media)
    shown = prompt(content("red"), tool_schemas=tuple(box.schemas(prompt(content("red")))))
    parser = make_parser("hermes", tokenizer)
    return episode_of(*answers, shown=shown, rewards=[1.0], tools=box, parser=parser, max_new_tokens=200, **fields)


def test_a_tool_shows_an_image_that_is_not_trained():
    episode = tool_episode(answer(CALL), answer("blue"), media=MediaSettings())
    made = asyncio.run(ToolAgentWorkflow(episode.context, tool_reward_weight=1.0).run(episode))
    assert (colors(made.media), made.reward, made.info["tool_failures"]) == ([RED, BLUE], 1.5, {})
    second = made.media[1]
    assert second.blocks[0].start > made.prompt_length
    assert not any(made.loss_mask[place] for place in second.places())
    pad = processor().tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert {made.tokens[place] for place in second.places()} == {pad}
    trained = [token for token, mask in zip(made.tokens, made.loss_mask, strict=True) if mask]
    assert tuple(trained) == answer(CALL) + answer("blue")
    said = next(each for each in made.messages if each["role"] == "tool")
    assert said["content"] == [{"type": "image", "digest": second.content.digest}, {"type": "text", "text": "A part."}]
    assert [len(each.media) for each in episode.engine.requests] == [1, 2]


def test_a_text_model_is_told_that_a_tool_returned_an_image():
    episode = tool_episode(answer(CALL), answer("blue"), media=None)
    made = asyncio.run(ToolAgentWorkflow(episode.context).run(episode))
    assert (len(made.media), made.info["tool_failures"]) == (1, {"bad_result": 1})


def test_other_episodes_continue_while_images_of_tools_and_classes_are_read():
    threads: list[threading.Thread] = []

    def draw() -> Any:
        """Draw a picture."""
        return ToolResponse("Blue.", image=watched("blue", threads))

    box = Toolbox(ToolsConfig(), SandboxConfig(), processor().tokenizer, [draw], media=MediaSettings())

    async def call_tool():
        async with box.open(prompt(content("red"))) as session:
            result = await session.call(ToolCall("1", "draw", {}))
        await box.close()
        return result

    assert asyncio.run(call_tool()).media[0].images()[0].getpixel((0, 0)) == BLUE
    num_of_tool = len(threads)

    class Sends(verl.AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            shown = [watched("red", threads)]
            tokens = await self.apply_chat_template(list(kwargs["raw_prompt"]), images=shown)
            await self.server_manager.generate(
                "1", prompt_ids=tokens, sampling_params=sampling_params, image_data=shown
            )

    episode = episode_of(answer("x"))
    assert run_class(VerlWorkflow, Sends, episode) is None
    assert colors(episode.engine.requests[0].media) == [RED]
    assert 0 < num_of_tool < len(threads)
    assert threading.main_thread() not in threads


def test_what_tools_may_return():
    parts = [{"type": "text", "text": "One."}, {"type": "image_url", "image_url": {"url": url_of("red")}}]
    for value in (
        picture("red"),
        ToolResponse(image=png("red")),
        (ToolResponse("", image=[picture("red")]), 0.5),
        parts,
    ):
        result = read_result(value)
        assert [each.images()[0].getpixel((0, 0)) for each in result.media] == [RED]
    assert read_result(parts).text == "One."
    assert read_result(ToolResponse("x", video=[png("red"), png("blue")])).media[0].kind == "video"
    assert read_result([{"type": "text", "text": "no picture"}]).text.startswith("[{")
    limits = MediaSettings.of(pictures.data_config(max_image_pixels=28 * 28))
    assert read_result(picture("red", (56, 56)), limits).media[0].images()[0].size == (28, 28)
    for value, message in (
        (ToolResponse("", image=b"no picture"), "media that cannot be read"),
        ([{"type": "image", "image": "/etc/passwd"}], "not read from the disk"),
        (ToolResponse("", image="/no/such.png"), "no such file"),
    ):
        with pytest.raises(BadResult, match=message):
            read_result(value)


def url_of(color: str) -> str:
    from headwater.data.message_media import with_data_urls

    (message,) = with_data_urls(prompt(content(color)).messages, prompt(content(color)).media)
    return message["content"][0]["image_url"]["url"]


# Agents that call an OpenAI address


def rules() -> SessionRules:
    return SessionRules(8, "ignore", "follow", lambda: make_parser("hermes", processor().tokenizer), set())


def chat(session: Session, messages: list[dict]) -> dict:
    reply = asyncio.run(answer_call(session, "chat/completions", {"model": "m", "messages": messages}))
    return reply.body["choices"][0]["message"]


def test_an_agent_sends_the_images_of_its_row_and_others():
    episode = episode_of(answer("a"), answer("b"), answer("c"), answer("d"))
    session = Session(episode, rules())
    start = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of("red")}},
                                          {"type": "text", "text": "What is this?"}]}]  # fmt: skip
    first = chat(session, start)
    asked = episode.engine.requests
    assert asked[0].input_tokens == episode.prompt.tokens, "the conversation of the row"
    assert asked[0].media == episode.prompt.media
    more = [{"role": "user", "content": [{"type": "image", "image": url_of("blue")}]}]
    second = chat(session, [*start, first, *more])
    assert colors(asked[1].media) == [RED, BLUE]
    assert asked[1].input_tokens[: len(asked[0].input_tokens)] == asked[0].input_tokens
    assert session.transcript.num_replies == len(list(session.transcript.last.path())) == 2
    green = {"type": "image_url", "image_url": {"url": url_of("green")}}
    other = [{"role": "user", "content": [green, start[0]["content"][1]]}]
    chat(session, other)
    assert len(session.transcript.leaves()) == 2, "another picture is another conversation"
    assert second["content"] == "b"


def test_what_an_agent_may_not_send():
    from headwater.serving.errors import ApiError

    file = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
    with pytest.raises(ApiError, match="not read from the disk of this machine; send a data URL"):
        chat(Session(episode_of(), rules()), [file])
    text = episode_of(shown=prompt(), processor=None)
    with pytest.raises(ApiError, match="the model of this episode takes no such parts; send text"):
        chat(Session(text, rules()), [{"role": "user", "content": [{"type": "image", "image": url_of("red")}]}])
    # A part that names a digest holds no image either.
    digest = {"type": "image", "digest": content("red").digest}
    with pytest.raises(ApiError, match=r"messages\[0\].content\[0\].type.*takes no such parts; send text"):
        chat(Session(text, rules()), [{"role": "user", "content": [digest]}])
    with pytest.raises(ApiError, match="holds no image"):
        chat(Session(episode_of(), rules()), [{"role": "user", "content": [digest]}])
    many = [{"type": "image", "image": "data:"}] * (MAX_ITEMS + 1)
    with pytest.raises(ApiError, match=f"{MAX_ITEMS + 1} images and videos, and the limit is {MAX_ITEMS}; send fewer"):
        chat(Session(episode_of(), rules()), [{"role": "user", "content": many}])


def test_the_pixels_of_an_agents_call_are_limited_in_total(monkeypatch):
    from headwater.serving.errors import ApiError

    monkeypatch.setattr("headwater.serving.media.MAX_REQUEST_PIXELS", 2 * 56 * 56)
    episode = episode_of(answer("a"), answer("b"))
    session = Session(episode, rules())
    part = {"type": "image", "image": url_of("red")}
    for _ in range(2):  # each call has the whole limit
        chat(session, [{"role": "user", "content": [part, part]}])
    assert [len(request.media) for request in episode.engine.requests] == [2, 2]
    for parts in ([part] * 3, [{"type": "video", "video": [url_of("red")] * 3}]):
        with pytest.raises(ApiError, match=r"the pictures of a request have more than 6272 pixels in total") as refused:
            chat(session, [{"role": "user", "content": parts}])
        assert refused.value.code == "bad_media"
    assert len(episode.engine.requests) == 2, "nothing was generated"


# Classes for verl and AReaL


def run_class(kind, made, episode: Episode, arguments: dict | None = None):
    return asyncio.run(kind(made, SETTING, arguments or {}, episode.context).run(episode))


class Look(areal.RolloutWorkflow):
    """As AReaL's workflows for vision models do."""

    def __init__(self, reward_fn, gconfig, tokenizer, processor):
        self.gconfig, self.processor = gconfig, processor

    async def arun_episode(self, engine, data):
        made = self.processor(images=data["images"], text=data["messages"], padding=False, return_tensors="pt")
        assert made["image_grid_thw"].tolist() == [[1, 4, 4]]
        tokens = made["input_ids"].tolist()[0]
        images = areal.image2base64(data["images"])
        reply = await engine.agenerate(areal.ModelRequest(input_ids=tokens, gconfig=self.gconfig, image_data=images))
        both = reply.input_tokens + reply.output_tokens
        mask = [0] * reply.input_len + [1] * reply.output_len
        return {
            "input_ids": torch.tensor([both]),
            "loss_mask": torch.tensor([mask]),
            "rewards": torch.tensor([1.0]),
            "multi_modal_input": [{"pixel_values": made["pixel_values"]}],
        }


def test_a_workflow_for_areal_sends_the_images_of_the_row():
    episode = episode_of(answer("red"))
    (made,) = run_class(ArealWorkflow, Look, episode)
    (asked,) = episode.engine.requests
    assert asked.input_tokens == episode.prompt.tokens
    assert colors(asked.media) == colors(made.media) == [RED]
    assert [item.blocks for item in made.media] == [item.blocks for item in episode.prompt.media]


@pytest.mark.parametrize("name", ["tiny:qwen2_5_vl", "tiny:smolvlm"])
def test_the_processor_of_a_class_joins_pictures_as_the_model_reads_them(name):
    own = load_processor(name)
    assert own is not None
    context = replace(episode_of().context, tokenizer=own.tokenizer, processor=own)
    marks = " and ".join([own.family.placeholder("image")] * 2)
    # SmolVLM shows the two in different numbers of parts.
    images = [picture("red"), picture("blue", (112, 56))]
    made = ClassProcessor(Pictures(context), own.tokenizer)(text=marks, images=images)
    contents = [load_image(each, "", None) for each in images]
    wanted = own.model_inputs(*own.encode(marks, contents))
    for key in made.keys() - {"attention_mask"}:
        assert torch.equal(made[key], wanted[key]), key
    assert "pixel_values" in made


def test_verls_own_loops_send_images():
    episode = episode_of(answer("red"), rewards=[1.0])
    (made,) = run_class(VerlWorkflow, SingleTurnAgentLoop, episode)
    assert made.media == episode.prompt.media, "the picture keeps its digest"
    assert made.tokens[: made.prompt_length] == episode.prompt.tokens

    episode = tool_episode(answer(CALL), answer("blue"), media=MediaSettings())
    (made,) = run_class(VerlWorkflow, ToolAgentLoop, episode)
    assert colors(made.media) == [RED, BLUE]
    assert not any(made.loss_mask[place] for item in made.media for place in item.places())
    assert [colors(each.media) for each in episode.engine.requests] == [[RED], [RED, BLUE]]


class Loop(verl.AgentLoopBase):
    """Sends other images than its tokens stand for."""

    async def run(self, sampling_params, **kwargs):
        tokens = await self.apply_chat_template(list(kwargs["raw_prompt"]), images=kwargs["multi_modal_data"]["image"])
        await self.server_manager.generate(
            "1", prompt_ids=tokens, sampling_params=sampling_params, image_data=[picture("red", (84, 84))]
        )
        raise AssertionError


def test_parts_of_a_class_may_have_settings():
    shown = Pictures(episode_of().context)

    def held(part: dict[str, Any]) -> Any:
        ((message,), contents) = shown.taken([{"role": "user", "content": [part]}])
        assert message["content"] == [{"type": "image", "digest": contents[0].digest}]
        return contents[0].images()[0].size

    part = {"type": "image", "image": picture("red", (56, 56))}
    assert held(part) == held({**part, "max_pixels": None}) == (56, 56)
    assert held({**part, "max_pixels": 100}) == (10, 10)
    with pytest.raises(DataError, match="resized_width is not supported"):
        held({**part, "resized_width": 28})


def test_images_without_their_tokens_are_refused():
    with pytest.raises(RolloutFailed, match="image 0: the request has no 9 tokens in a row that stand for it"):
        run_class(VerlWorkflow, Loop, episode_of(answer("x")))
    pad = processor().tokenizer.convert_tokens_to_ids("<|image_pad|>")
    # Four placeholders that the model has written are no image.
    episode = episode_of((*[pad] * 4, pictures.end()), answer("x"))

    class Twice(Loop):
        async def run(self, sampling_params, **kwargs):
            shown = kwargs["multi_modal_data"]["image"]
            tokens = await self.apply_chat_template(list(kwargs["raw_prompt"]), images=shown)
            given = {"sampling_params": sampling_params}
            made = await self.server_manager.generate("1", prompt_ids=tokens, image_data=shown, **given)
            more = [*shown, picture("blue")]
            await self.server_manager.generate("1", prompt_ids=[*tokens, *made], image_data=more, **given)

    with pytest.raises(RolloutFailed, match="image 1: the request has no 4 tokens in a row"):
        run_class(VerlWorkflow, Twice, episode)
    assert json.dumps(episode.messages), "messages are plain data"
