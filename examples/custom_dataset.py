"""Your own dataset: a class with `__len__` and `__getitem__`, named in the config.

    headwater train recipes/quickstart.yaml data.dataset=examples/custom_dataset.py:Doubling

This one makes its rows as it goes. Its rows say `data_source="arithmetic"`, so the built-in scorer of that name judges
the responses; with another name you would set reward.function.
"""

from __future__ import annotations

from typing import Any

from headwater.core.records import Prompt


class Doubling:
    """``2*17=`` for every number below `limit`; every fifth is held out."""

    def __init__(self, *, tokenizer: Any, split: str, seed: int, limit: int = 500, **_: Any) -> None:
        self._tokenizer = tokenizer
        self._split = split
        self._numbers = [number for number in range(limit) if (number % 5 == 0) == (split == "eval")]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int, /) -> Prompt:
        number = self._numbers[index]
        messages = ({"role": "user", "content": f"2*{number}="},)
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return Prompt(
            uid=f"doubling/{self._split}/{number}",
            messages=messages,
            text=text,
            tokens=tuple(self._tokenizer.encode(text, add_special_tokens=False)),
            data_source="arithmetic",
            ground_truth=str(2 * number),
            extra_info={"demonstration": str(2 * number)},
        )
