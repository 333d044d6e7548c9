"""Where in a model the engine and the learner part: values inside every layer of both, for one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwater.core.records import NOT_SAMPLED, Trajectory
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.engine.engine import Engine
from headwater.learner import packed_module
from headwater.learner.engine import TrainEngine
from headwater.models.packed_attention import PackedAttention
from headwater.rollout.group import pad_trajectories

POINTS = ("query", "attention", "gated", "residual")
"""In the order in which a layer computes them: rotated queries, the results of attention, the input of the last
projection, and the sum after the layer."""

Values = dict[tuple[int, str], Tensor]
"""``[tokens, width]`` in float32 on the CPU, by layer and point."""


@dataclass(frozen=True)
class LayerRow:
    """Relative differences at one point of one layer."""

    layer: int
    point: str
    engine_learner: float
    engine_exact: float
    learner_exact: float


def layer_table(engine: Engine, learner: TrainEngine, exact: TrainEngine, response: ModelResponse) -> list[LayerRow]:
    """Compare the sides on the tokens of ``response``, which the engine scores as a prompt."""
    tokens = response.input_tokens + response.output_tokens
    of_engine = engine_values(engine, tokens)
    of_learner, of_exact = (learner_values(each, tokens) for each in (learner, exact))
    rows = []
    for layer, point in sorted(of_exact, key=lambda each: (each[0], POINTS.index(each[1]))):
        key = layer, point
        if key not in of_engine or key not in of_learner:
            continue
        # The learner does not compute the last token, which predicts nothing.
        length = min(len(of_exact[key]), len(of_engine[key]), len(of_learner[key]))
        a, b, c = (each[key][:length] for each in (of_engine, of_learner, of_exact))
        rows.append(LayerRow(layer, point, _apart(a, b, c), _apart(a, c, c), _apart(b, c, c)))
    return rows


def show_layers(dtype: str, rows: list[LayerRow]) -> None:
    print(f"\n{dtype}: relative differences")
    print(f"{'layer':>5} {'point':<10} {'engine-learner':>14} {'engine-exact':>12} {'learner-exact':>13}")
    for row in rows:
        print(
            f"{row.layer:>5} {row.point:<10} {row.engine_learner:>14.2e} {row.engine_exact:>12.2e} "
            f"{row.learner_exact:>13.2e}"
        )


def _apart(left: Tensor, right: Tensor, scale: Tensor) -> float:
    """The median over tokens: the first token often has a huge residual that hides all others."""
    difference = (left - right).norm(dim=-1) / scale.norm(dim=-1).clamp(min=1e-30)
    return float(difference.median())


def engine_values(engine: Engine, tokens: tuple[int, ...]) -> Values:
    decoder = engine._runner._fused
    if decoder is None:
        raise SystemExit("--layers: the engine runs this model with the layers of transformers")
    tapped = _TappedOps(decoder._ops)
    decoder._ops = tapped
    try:
        sampling = SamplingParams(max_new_tokens=0, prompt_logprobs=True)
        engine.generate([ModelRequest("layers", tokens, sampling, 0)])
    finally:
        decoder._ops = tapped.ops
    return tapped.values


class _TappedOps:
    """The engine's operations, which also keep their values."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.values: Values = {}
        self._num_sums = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def rope_and_store(self, qkv: Tensor, rotary: Any, slots: Tensor, cache: Any, layer: int, norms: Any) -> Tensor:
        query = self.ops.rope_and_store(qkv, rotary, slots, cache, layer, norms)
        self.values[layer, "query"] = _kept(query)
        return query

    def linear_add_rms_norm(self, x: Tensor, projection: Any, residual: Tensor, *rest: Any) -> Tensor:
        result = self.ops.linear_add_rms_norm(x, projection, residual, *rest)
        layer, is_second = divmod(self._num_sums, 2)
        self._num_sums += 1
        self.values[layer, "gated" if is_second else "attention"] = _kept(x)
        if is_second:
            self.values[layer, "residual"] = _kept(residual)
        return result


def learner_values(learner: TrainEngine, tokens: tuple[int, ...]) -> Values:
    length = len(tokens)
    trajectory = Trajectory(
        uid="layers",
        sample=0,
        tokens=tokens,
        prompt_length=1,
        loss_mask=(0,) + (1,) * (length - 1),
        logprobs=(0.0,) * length,
        versions=(NOT_SAMPLED,) + (0,) * (length - 1),
        reward=0.0,
        stop_reason="length",
    )
    values: Values = {}
    with ExitStack() as stack:
        stack.enter_context(_tapped_attention(values))
        for index, layer in enumerate(learner.module.layers):
            down = layer.mlp.down_proj.register_forward_pre_hook(_keep_input(values, (index, "gated")))
            out = layer.register_forward_hook(_keep_output(values, (index, "residual")))
            stack.callback(down.remove)
            stack.callback(out.remove)
        learner.compute(pad_trajectories([trajectory], pad_token_id=0))
    return values


@contextmanager
def _tapped_attention(values: Values) -> Iterator[None]:
    plain = packed_module.packed_attention

    def tapped(*arguments: Any) -> PackedAttention:
        attention, num_calls = plain(*arguments), iter(range(10_000))

        def call(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int) -> Tensor:
            output = attention(query, key, value, scale=scale, window=window)
            layer = next(num_calls)
            values[layer, "query"], values[layer, "attention"] = _kept(query), _kept(output)
            return output

        return call

    packed_module.packed_attention = tapped
    try:
        yield
    finally:
        packed_module.packed_attention = plain


def _keep_input(values: Values, key: tuple[int, str]) -> Callable[..., None]:
    def hook(module: Any, inputs: tuple[Tensor, ...]) -> None:
        values[key] = _kept(inputs[0][0])

    return hook


def _keep_output(values: Values, key: tuple[int, str]) -> Callable[..., None]:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        # A layer may leave its second addition to the next one.
        values[key] = _kept((output[0] + output[1] if isinstance(output, tuple) else output)[0])

    return hook


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten(1).to("cpu", torch.float32, copy=True)
