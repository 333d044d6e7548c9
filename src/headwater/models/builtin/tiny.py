"""``tiny:<preset>``: small models with random weights and their tokenizer, built offline.

Torch and transformers are imported only to build something, so that a preset's name can be checked without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ModelError
from headwater.core.registry import nearest
from headwater.models.builtin import tiny_vision
from headwater.models.builtin.chat_template import TINY_TEMPLATE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TINY_PREFIX = "tiny:"
VOCABULARY_SIZE = 512

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (PAD_TOKEN, END_TOKEN, *(f"<|{role}|>" for role in ROLES))
"""In the order of their ids: pad is 0 and end is 1."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The shape of a decoder that is small enough to train on a CPU."""

    architecture: str
    """The transformers model type."""
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 2048


def _small(architecture: str) -> Preset:
    return Preset(architecture, hidden_size=256, intermediate_size=768, num_layers=6, num_heads=8, num_kv_heads=4)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "qwen3": Preset("qwen3"),
        "qwen2": Preset("qwen2"),
        "llama": Preset("llama"),
        "qwen3-small": _small("qwen3"),
        "llama-small": _small("llama"),
        **{name: Preset(name) for name in tiny_vision.VISION_PRESETS},
    }
)


def find_preset(path: str, key: str = "model.path") -> Preset:
    """The preset of the model path ``tiny:<name>``."""
    name = path.removeprefix(TINY_PREFIX)
    if name not in PRESETS:
        raise ModelError(f"{key} = {path}: unknown preset {name!r}; {nearest(name, sorted(PRESETS))}")
    return PRESETS[name]


def build_model(path: str, *, seed: int) -> Any:
    """The model of ``tiny:<preset>`` in float32 on the CPU. The seed alone determines its weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    preset = find_preset(path)
    config = build_config(preset)
    auto_class = (
        AutoModelForImageTextToText if preset.architecture in tiny_vision.VISION_PRESETS else AutoModelForCausalLM
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would also reset the CUDA generators, which fork_rng(devices=[]) does not restore.
        torch.default_generator.manual_seed(seed)
        model = auto_class.from_config(config, dtype=torch.float32)
    text_config = config.get_text_config()
    model.generation_config = GenerationConfig(
        eos_token_id=text_config.eos_token_id, pad_token_id=text_config.pad_token_id
    )
    return model.eval()


def build_config(preset: Preset) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    if preset.architecture in tiny_vision.VISION_PRESETS:
        extra = tiny_vision.extra_tokens(preset.architecture)
        return tiny_vision.build_config(preset.architecture, _text_settings(preset, len(extra)), VOCABULARY_SIZE)
    config_class = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}[preset.architecture]
    return config_class(**_text_settings(preset))


def _text_settings(preset: Preset, num_extra_tokens: int = 0) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_SIZE + num_extra_tokens,
        "hidden_size": preset.hidden_size,
        "intermediate_size": preset.intermediate_size,
        "num_hidden_layers": preset.num_layers,
        "num_attention_heads": preset.num_heads,
        "num_key_value_heads": preset.num_kv_heads,
        "head_dim": preset.head_dim,
        "max_position_embeddings": preset.max_positions,
        "tie_word_embeddings": True,
        # The usual 0.02 suits widths in the thousands. At width 128 it needs over twice the steps to learn addition.
        "initializer_range": preset.hidden_size**-0.5,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(END_TOKEN),
        "pad_token_id": SPECIAL_TOKENS.index(PAD_TOKEN),
    }


def build_tokenizer(path: str = "") -> Any:
    """A ``PreTrainedTokenizerFast``: byte-level BPE, trained on ``CORPUS`` in milliseconds, always with the same ids.

    That of a vision model has further special tokens and a chat template with images.

    Every byte has a token, so any text survives encoding and decoding. Each digit is a separate token, so numbers of
    equal length have equally many tokens and a model can learn arithmetic column by column.
    """
    from transformers import PreTrainedTokenizerFast

    architecture = find_preset(path).architecture if path else ""
    template = tiny_vision.template(architecture) if architecture in tiny_vision.VISION_PRESETS else TINY_TEMPLATE
    return PreTrainedTokenizerFast(
        tokenizer_object=_train_bpe(),
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        extra_special_tokens=[*SPECIAL_TOKENS[2:], *tiny_vision.extra_tokens(architecture)],
        chat_template=template,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _train_bpe() -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    return tokenizer


CORPUS = """\
What is the sum of the two numbers? What is the difference between them? What is the product of the numbers?
What is one plus one? What is nine minus three? What is four times five? What is eight divided by two?
Answer: Yes. Answer: No. Answer: x. Answer: y. Answer: The answer is <answer>. Answer: the result is <answer>.
Answer: True. Answer: False. Answer: Give the final answer between <answer> and </answer>.
Question: Compute the value of the expression. Question: Find the value of x. Question: Solve the equation for x.
Write the answer inside <answer> </answer> tags. Put your final answer after ####. Think step by step, then answer.
<think> First we add the numbers. Then we subtract. Next we multiply, and last we divide. So the answer is </think>
<think> Let us check this step. We have the first number, then the second number, then the third number. </think>
<answer> </answer> <answer> </answer> <answer> </answer> <think> </think> <tool_call> </tool_call> <tool_response>
 + - * / = ( ) + - * / = ( ) + - * / = ( ) < > <= >= != == ** // % , . : ; ? ! $ # " '
 + ( - ( * ( / ( = ( ) + ) - ) * ) / ) = ) , ( ), ). (( )) [ ] { } [] {} () \\( \\) \\[ \\] \\boxed{ } \\frac{ }{ }
 \\times \\cdot
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million first second third half double
Using the numbers, make an equation that equals the target. You may use each number once, with +, -, * and /.
Use all of the numbers exactly once to reach the target. Show your work, then return the equation.
How many are left? How many are there in total? How much does each cost? How much money does she have now?
She has some apples and he gives her more. They buy boxes of pencils for dollars each. He sells half of them every day.
If there are so many in each box, how many boxes are there? After that they have less than before. All of them are here.
Calculate: add, subtract, multiply, divide, plus, minus, times, equals, sum, difference, product, quotient, remainder.
Sort the list of words in order. Reverse the string. Count the letters in the word. Is the statement true or false?
Return only the number. Return the answer as a number, with no other words. Do not explain. Yes. No. True. False.
You are a helpful assistant. You solve problems with care. The user asks a question and the assistant answers it.
You can call a tool with a name and arguments: {"name": "calculator", "arguments": {"expression": ""}} Result: Error:
Step: we know that x = y, so x + y = z. Then z - y = x. Therefore the value is the same. Hence the total is this number.
def solve(x, y): return x + y for i in range(n): if x == y: print(x) else: import math while not True
The number of people who were at the place in the morning was more than the number that came in the evening.
It takes her an hour to read the book; he reads it in minutes. Each week has days, each day has hours, each year months.
"""
"""The text that the tokenizer learns its merges from: the wording of small reasoning tasks, so that their prompts and
answers need few tokens. Changing a character here changes the token ids of every ``tiny:`` model."""
