"""An episode sends images with its tokens, and never trains on them."""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import threading

import numpy as np
import pytest
from workflows import pictures
from workflows.pictures import answer, content, encode, episode_of, picture, png, processor, prompt, watched

from headwater.chat.next_turn import next_turn
from headwater.chat.render import MODEL_TURN, render_chat
from headwater.core.errors import RolloutFailed
from headwater.core.media import identity_tokens, rotary_positions
from headwater.data.media import load_image
from headwater.models.load import load_processor


def data_url(color: str) -> dict:
    url = "data:image/png;base64," + base64.b64encode(png(color)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def told(part: dict, text: str = "And this?") -> list[dict]:
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


def digests(media) -> list[str]:
    return [item.content.digest for item in media]


def check_blocks(tokens, media) -> None:
    """Every block is a run of placeholder tokens, and no placeholder is outside of one."""
    pad = processor().tokenizer.convert_tokens_to_ids("<|image_pad|>")
    at_media = np.zeros(len(tokens), bool)
    for item in media:
        at_media[item.places()] = True
    assert at_media.tolist() == [token == pad for token in tokens]


def test_images_of_the_prompt_and_of_messages_are_sent_and_not_trained():
    async def run(episode):
        await episode.reply()
        assert episode.tell(told(data_url("blue")))
        await episode.reply()
        assert episode.tell(told({"type": "image", "image": picture("green", (84, 56))}))
        await episode.reply()
        return episode.finish(1.0)

    episode = episode_of(answer("a red one"), answer("a blue one"), answer("green"))
    made = asyncio.run(run(episode))
    asked = episode.engine.requests
    contents = [content("red"), content("blue"), load_image(picture("green", (84, 56)), "", None)]
    wanted = [each.digest for each in contents]
    assert [digests(each.media) for each in asked] == [wanted[:1], wanted[:2], wanted]
    assert digests(made.media) == wanted
    assert [item.num_tokens for item in made.media] == [4, 4, 6]
    check_blocks(made.tokens, made.media)
    for item in made.media:
        assert not any(made.loss_mask[place] or made.versions[place] != -1 for place in item.places())
    # The tokens are those of the whole conversation, rendered at once.
    text = render_chat(processor().template, made.messages, add_generation_prompt=False)
    whole, placed = processor().encode(text, contents)
    assert made.tokens == whole[: len(made.tokens)]
    assert placed == made.media
    assert [part["digest"] for message in made.messages for part in message["content"] if isinstance(part, dict)
            and part["type"] == "image"] == wanted  # fmt: skip
    # Every request begins with the tokens of the one before, also as the model reads them.
    for before, after in itertools.pairwise(asked):
        length = len(before.input_tokens)
        assert after.input_tokens[:length] == before.input_tokens
        first = identity_tokens(before.input_tokens, before.media)
        assert (identity_tokens(after.input_tokens, after.media)[:length] == first).all()
        assert (rotary_positions(len(after.input_tokens), after.media)[:, :length]
                == rotary_positions(length, before.media)).all()  # fmt: skip


def test_images_can_be_loaded_while_other_episodes_continue():
    threads: list[threading.Thread] = []
    messages = told({"type": "image", "image": watched("blue", threads)})

    async def run(episode):
        await episode.reply()
        loaded = await episode.read_media(messages)
        assert episode.tell(loaded)
        branch = episode.branch(loaded)
        return digests(episode.media), digests(branch.media)

    blue = load_image(picture("blue"), "", None).digest
    assert asyncio.run(run(episode_of(answer("a")))) == ([content("red").digest, blue], [blue])
    assert threads
    assert threading.main_thread() not in threads
    with pytest.raises(RolloutFailed, match=r"read_media\(\) was given messages\[0\]\.content\[0\]: no such file"):
        asyncio.run(episode_of().read_media(told({"type": "image", "image": "/no/such.png"})))


def test_room_counts_the_tokens_of_images():
    between = encode("<|user|>And this?<|end|><|assistant|>")
    needed = len(answer("x")) + len(between) + 2 + 4 + 1  # the marks of an image, its tokens, and one of the reply
    for room, fits in ((needed, True), (needed - 1, False)):
        episode = episode_of(answer("x"), answer("y"), max_new_tokens=room)
        asyncio.run(episode.reply())
        assert episode.tell(told(data_url("blue"))) is fits
        assert len(episode.media) == 1 + fits
        assert episode.stop_reason == ("stop" if fits else "length")


def test_branches_and_copies_have_the_images_of_their_tokens():
    async def run(episode):
        await episode.reply()
        episode.tell(told(data_url("blue")))
        await episode.reply()

    episode = episode_of(answer("a"), answer("b"))
    asyncio.run(run(episode))
    red, blue = content("red").digest, content("blue").digest
    assert [digests(episode.branch(turn=turn).media) for turn in (0, 1, 2)] == [[red], [red], [red, blue]]
    copied = episode.copy()
    copied.tell(told(data_url("green")))
    assert (len(copied.media), len(episode.media)) == (3, 2)
    # Messages of the episode can be used again: their parts name images by digest.
    summary = episode.branch([episode.messages[2], {"role": "assistant", "content": "b"}, *episode.messages[:1]])
    assert digests(summary.media) == [blue, red]
    check_blocks(summary.tokens, summary.media)
    with pytest.raises(RolloutFailed, match=r"a part of type 'image' holds no image"):
        episode.branch(told({"type": "image"}))
    with pytest.raises(RolloutFailed, match=r"not a readable image|cannot be read"):
        episode.branch(told({"type": "image", "image": b"no picture"}))


def test_a_sampled_placeholder_is_a_token_like_others():
    pad = processor().tokenizer.convert_tokens_to_ids("<|image_pad|>")

    async def run(episode):
        await episode.reply()
        episode.tell([{"role": "user", "content": "Is <|image_pad|> a word?"}])
        await episode.reply()
        return episode.finish(0.0)

    made = asyncio.run(run(episode_of((pad, pad, pictures.end()), answer("no"))))
    assert made.tokens.count(pad) == 4 + 2 + 1
    assert len(made.media) == 1


def test_a_text_model_refuses_images():
    episode = episode_of(answer("x"), processor=None)
    with pytest.raises(RolloutFailed, match="row: has images or videos, but the model takes only text"):
        asyncio.run(episode.reply())
    plain = episode_of(answer("x"), shown=prompt(), processor=None)
    asyncio.run(plain.reply())
    with pytest.raises(RolloutFailed, match=r"tell\(\) was given message parts of type image_url, which the model"):
        plain.tell(told(data_url("blue")))


SMOLVLM = (
    "{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == 'image' %}"
    "{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<|image_pad|>' }}{% endif %}{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def test_a_template_that_knows_only_parts_shows_texts_too():
    """Such templates leave out a content that is text, without an error."""
    own = copy.copy(processor().tokenizer)
    own.chat_template = SMOLVLM
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "image"}]}]
    assert render_chat(own, chat) == "System: Be short.<|end|>\nUser:<|image_pad|><|end|>\nAssistant:"
    turns = [*chat, MODEL_TURN, {"role": "user", "content": "Why?"}]
    turn = next_turn(own, turns, answer("x"), {})
    assert own.decode(turn.tokens) == "\nUser: Why?<|end|>\nAssistant:"


def test_other_models_with_images_between_turns():
    for name in ("tiny:qwen3_vl", "tiny:smolvlm"):
        own = load_processor(name)
        part = load_image(picture("blue"), "", None)
        chat = [{"role": "user", "content": "Hi"}, MODEL_TURN, {"role": "user", "content": [{"type": "image"}]}]
        end = own.tokenizer.eos_token_id
        turn = next_turn(own.tokenizer, chat, (9, end), {}, has_ended=True, processor=own, contents=[part])
        said = [chat[0], {"role": "assistant", "content": "Z"}, chat[2]]
        whole, (item,) = own.encode(render_chat(own.template, said), [part])
        assert turn.tokens == whole[-len(turn.tokens) :]
        assert [turn.media[0].moved(len(whole) - len(turn.tokens))] == [item]
