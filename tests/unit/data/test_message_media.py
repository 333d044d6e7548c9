from __future__ import annotations

import io

import pytest
from PIL import Image

from headwater.core.errors import DataError
from headwater.data.message_media import load_message_media, take_message_media


def message(part):
    return [{"role": "user", "content": [part]}]


def picture():
    stream = io.BytesIO()
    Image.new("RGB", (9, 9), "red").save(stream, "PNG")
    return stream.getvalue()


def test_a_digest_stands_for_a_known_content():
    _, (content,) = take_message_media(load_message_media(message({"type": "image", "image": picture()}), "here"))
    shown = message({"type": "image", "digest": content.digest, "image": None})
    assert take_message_media(load_message_media(shown, "here", {content.digest: content}))[1] == [content]
    with pytest.raises(DataError, match=r"here\[0\].content\[0\]: a part of type 'image' holds no image"):
        load_message_media(shown, "here")


@pytest.mark.parametrize("digest", [[], {}, 7])
def test_a_digest_is_text(digest):
    part = {"type": "image", "digest": digest}
    with pytest.raises(DataError, match=r"here\[0\].content\[0\]: digest = .*; must be a string"):
        load_message_media(message(part), "here", may_read_files=False)
