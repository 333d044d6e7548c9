"""A real tokenizer and a real processor, built without any download: one token per byte, so lengths can be counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|{{ part.type }}_pad|>{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if shout is defined and shout %}!{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def build_tokenizer(chat_template: str | None) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|image_pad|>", "<|video_pad|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_tokenizer(CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def tokenizer_without_template() -> Any:
    return build_tokenizer(None)


@pytest.fixture(scope="session")
def processor(tokenizer: Any) -> Any:
    """Qwen2.5-VL's image processor: a token for every 28x28 pixels, from 1 to 16 of them."""
    from headwater.models.load import load_processor
    from headwater.models.vision.processor import VisionProcessor

    tiny = load_processor("tiny:qwen2_5_vl")
    assert tiny is not None
    return VisionProcessor(tokenizer, tiny.family)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: Iterable[object], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[dict[str, Any]], name: str = "rows.parquet") -> str:
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / name
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return str(path)

    return write
