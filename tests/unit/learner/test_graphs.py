"""Recorded passes, repeated without CUDA graphs: filled-up packs in tensors that keep their addresses suffice."""

from __future__ import annotations

import copy
import math

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner.test_engine import actor, experience, weights
from learner.test_packing import MODEL, batch, packs

from headwater.config.schema import LearnerConfig, LoraConfig
from headwater.learner import fixed_pack
from headwater.learner import graphs as graphs_module
from headwater.learner.engine import ForwardEngine, TrainEngine
from headwater.learner.fixed_pack import FilledPack, FixedInputs, PassShape, rounded_up
from headwater.learner.graphs import PassGraphs
from headwater.learner.lora import add_adapters, without_adapters
from headwater.learner.packed_module import _CHUNK_ELEMENTS, PackedModule, PolicyModule, ValueModule
from headwater.models.grid_attention import GridAttention
from headwater.models.packed_attention import BucketedAttention
from headwater.models.scored import load_critic

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def short_sequences():
    """On a CPU, attention to keys that are not there takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_pack, "_LEAST_LENGTH", 16)
        yield


class PlainRecorder:
    """Repeats by calling the functions again, which also works on a CPU."""

    num_bytes = 0

    def record(self, actions):
        return list(actions)

    def forget(self):
        pass


class Counting(PlainRecorder):
    """Counts what is recorded."""

    num_recorded = 0

    def record(self, actions):
        self.num_recorded += 1
        return super().record(actions)


def graphed(module: PackedModule, **options) -> PassGraphs:
    return PassGraphs(module, CPU, Counting(), **options)


def results(module: PackedModule, data, run, **packing) -> list[torch.Tensor]:
    """All outputs, and the gradients of a sum of those that have one."""
    generator = torch.Generator().manual_seed(0)
    found: list[torch.Tensor] = []
    for pack in packs(data, **packing):
        made = {name: pack.padded(each) for name, each in run(pack).items()}
        upstream = {name: torch.randn(each.shape, generator=generator) for name, each in made.items()}
        torch.stack([(made[name] * upstream[name]).sum() for name in made if made[name].requires_grad]).sum().backward()
        found += [each.detach() for each in made.values()]
    return [*found, *(each.grad.clone() for each in module.parameters() if each.grad is not None)]


def compared(make, data, **packing) -> PassGraphs:
    """Check that a module computes the same with and without a filled-up pack. Returns the graphs."""
    plain, module = make(), make()
    graphs = graphed(module)
    expected = results(plain, data, plain, **packing)
    actual = results(module, data, lambda pack: graphs(graphs.filled(pack, pack)), **packing)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=5e-4)
    return graphs


def policy() -> PolicyModule:
    return PolicyModule(copy.deepcopy(MODEL), 0.7)


def with_adapters() -> PolicyModule:
    module = policy()
    add_adapters(module.model, LoraConfig(rank=4))
    torch.manual_seed(0)
    for name, each in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.02)
    return module


@pytest.mark.parametrize(
    ("make", "packing"),
    [
        (policy, {}),
        (policy, {"share_prompts": False}),
        (policy, {"max_tokens": 40}),
        (with_adapters, {}),
        (lambda: ValueModule(load_critic("tiny:qwen3", dtype="float32", device="cpu", seed=0)), {}),
    ],
    ids=["policy", "separate prompts", "accumulated", "adapters", "values"],
)
def test_a_filled_up_pack_has_the_results_and_gradients_of_the_pack(make, packing):
    compared(make, batch(num_groups=8), **packing)


def test_one_pass_is_recorded_for_packs_of_one_shape_and_another_one_without_gradients():
    module = policy()
    graphs = graphed(module)
    for seed in range(3):
        (pack,) = packs(batch(seed, num_groups=2))
        graphs(graphs.filled(pack, pack))
    assert graphs._recorder.num_recorded == graphs.num_kept == 1
    with torch.no_grad():
        graphs(graphs.filled(pack, pack))
    assert graphs.num_kept == 2


def test_a_repeated_pass_has_the_same_bits():
    module = policy()
    graphs = graphed(module)
    first = results(module, batch(1), lambda pack: graphs(graphs.filled(pack, pack)))
    module.zero_grad()
    results(module, batch(2), lambda pack: graphs(graphs.filled(pack, pack)))
    module.zero_grad()
    again = results(module, batch(1), lambda pack: graphs(graphs.filled(pack, pack)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 6), st.booleans(), st.booleans())
def test_filled_up_inputs_keep_the_pack_and_attend_to_nothing_new(seed, num_groups, share_prompts, is_coarse):
    for pack in packs(batch(seed, num_groups), 60, share_prompts=share_prompts):
        shape = PassShape.of(pack, is_coarse=is_coarse)
        inputs = FixedInputs.of(pack, shape)
        assert torch.equal(inputs.input_ids[: len(pack.input_ids)], pack.input_ids)
        assert torch.equal(inputs.predictors[: len(pack.targets)], pack.predictors)
        assert [len(each) for each in inputs[:4]] == [shape.num_tokens] * 2 + [shape.num_predictions] * 2
        assert len(inputs.query_starts) == len(inputs.key_starts) == shape.num_segments + 1
        assert int(inputs.query_starts[-1]) == shape.num_tokens > len(pack.input_ids)
        lengths = inputs.query_starts.diff()
        assert int(lengths.max()) <= shape.longest_query
        assert int(inputs.key_starts.diff().max()) <= shape.longest_key
        assert share_prompts or not shape.num_keys
        alone = PassShape.of(pack, has_gradient=False, is_coarse=is_coarse)
        assert (alone.num_keys, alone.num_shared) == (shape.num_keys, 0)
        assert torch.equal(FixedInputs.of(pack, alone).key_places, inputs.key_places)
        generator = torch.Generator().manual_seed(seed)
        query, key, value = torch.randn(3, shape.num_tokens, 2, 8, generator=generator)
        ours = GridAttention(inputs.tables(shape))(query, key, value, scale=0.3, window=seed % 3)
        real = slice(0, len(pack.input_ids))
        plain = BucketedAttention(pack.segments, CPU)
        theirs = plain(query[real], key[real], value[real], scale=0.3, window=seed % 3)
        torch.testing.assert_close(ours[real], theirs, atol=1e-5, rtol=1e-5)
        assert ours.isfinite().all()


def test_sizes_grow_by_a_quarter_or_to_the_next_power_of_two():
    assert [rounded_up(size, 128, 4) for size in (1, 128, 129, 256, 257, 320, 321, 4000)] == [
        128, 128, 160, 256, 320, 320, 384, 4096,
    ]  # fmt: skip
    assert [rounded_up(size, 16) for size in (3, 17, 64, 65)] == [16, 32, 64, 128]
    assert [rounded_up(size, 1) for size in (1, 2, 3)] == [1, 2, 4]


def test_a_pack_is_computed_without_a_graph_if_it_is_too_large():
    (pack,) = packs(batch())
    assert isinstance(graphed(policy()).filled(pack, pack), FilledPack)
    assert graphed(policy(), most_bytes=1).filled(pack, pack) is pack


def test_a_forward_pass_before_the_backward_pass_of_another_is_refused():
    graphs = graphed(policy())
    (pack,) = packs(batch())
    filled = graphs.filled(pack, pack)
    late = graphs(filled)["logprobs"].sum()
    graphs(filled)
    with pytest.raises(RuntimeError, match="has overwritten its activations"):
        late.backward()


def test_without_its_adapters_a_model_has_its_own_graph():
    module = with_adapters()
    graphs = graphed(module)
    (pack,) = packs(batch())
    with torch.no_grad():
        adapted = graphs(graphs.filled(pack, pack))["logprobs"].clone()
        with without_adapters(module):
            plain = graphs(graphs.filled(pack, pack))["logprobs"].clone()
            torch.testing.assert_close(plain, module(pack)["logprobs"], atol=1e-5, rtol=1e-4)
        again = graphs(graphs.filled(pack, pack))["logprobs"]
    assert torch.equal(adapted, again)
    assert not torch.allclose(adapted, plain)


def engine(weight_type: torch.dtype = torch.float64, **options) -> TrainEngine:
    """Its passes compute in float32, with working copies if its weights have another type."""
    config = LearnerConfig(learning_rate=1e-3, skip_zero_advantages=False, **options)
    module = PolicyModule(copy.deepcopy(MODEL).to(weight_type), 1.0)
    return TrainEngine(module, config, compute_dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("weight_type", [torch.float64, torch.float32])
def test_updates_with_graphs_are_those_without(weight_type):
    plain, recorded = (engine(weight_type, max_tokens_per_microbatch=40) for _ in range(2))
    assert (recorded.module.copies is None) == (weight_type == torch.float32)
    recorded.graphs = graphed(recorded.module)
    statistics = [[actor(each).update(experience(seed)) for seed in (1, 2, 3)] for each in (plain, recorded)]
    for ours, theirs in zip(*statistics, strict=True):
        for key in ("loss", "entropy", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-5)
    torch.testing.assert_close(weights(recorded), weights(plain), atol=1e-4, rtol=1e-3)
    assert recorded.graphs._recorder.num_recorded == recorded.graphs.num_kept  # the weights did not move
    ours, theirs = (each.compute(experience(4))["logprobs"] for each in (recorded, plain))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)


def test_weights_that_move_are_recorded_again():
    learner = engine()
    learner.graphs = graphed(learner.module)
    before = learner.compute(experience(1))["logprobs"]
    recorder = learner.graphs._recorder
    assert recorder.num_recorded == 1
    learner.compute(experience(1))
    assert recorder.num_recorded == 1
    memory = learner.module.copies._views[0].data_ptr()
    held = torch.empty(10_000)  # so that the next memory is not the same
    learner.offload()
    assert learner.graphs.num_kept == 0
    assert not learner.module.copies._views
    assert torch.equal(learner.compute(experience(1))["logprobs"], before)
    assert recorder.num_recorded == 2
    assert memory
    assert held is not None


def test_a_pass_that_cannot_be_recorded_is_computed_without_a_graph(caplog):
    class Failing(PlainRecorder):
        def record(self, actions):
            actions[0]()
            raise RuntimeError("operation not permitted when stream is capturing")

    learner, plain = engine(), engine()
    learner.graphs = PassGraphs(learner.module, CPU, Failing())
    ours, theirs = (actor(each).update(experience(1)) for each in (learner, plain))
    assert ours == theirs
    assert torch.equal(weights(learner), weights(plain))
    assert caplog.text.count("recording one failed: operation not permitted") == 1


def test_the_oldest_graph_is_discarded(monkeypatch):
    monkeypatch.setattr(graphs_module, "_MOST_GRAPHS", 2)
    graphs = graphed(policy())
    with torch.no_grad():
        for number in (1, 10, 20, 1):
            (pack,) = packs(batch(num_groups=number))
            graphs(graphs.filled(pack, pack))
    assert graphs.num_kept == 2
    assert graphs._recorder.num_recorded == 4


class Growing(Counting):
    """What is recorded can use the memory of larger passes that were recorded before, but not of smaller ones."""

    largest = 0

    def record(self, actions):
        if self.needed > self.largest:
            self.num_bytes += self.needed
            self.largest = self.needed
        return super().record(actions)

    def forget(self):
        self.num_bytes = self.largest = 0


def test_graphs_that_would_hold_too_much_memory_are_recorded_again():
    module, plain = policy(), policy()
    recorder = Growing()
    graphs = PassGraphs(module, CPU, recorder, most_bytes=1000)

    def num_bytes(shape):
        recorder.needed = {1: 300, 10: 600, 20: 900}[number]
        return recorder.needed

    graphs._num_bytes = num_bytes
    recorded = []
    with torch.no_grad():
        for number in (1, 10, 20, 1, 10, 20, 1):
            (pack,) = packs(batch(num_groups=number))
            made = graphs(graphs.filled(pack, pack))
            torch.testing.assert_close(made["logprobs"], plain(pack)["logprobs"], atol=1e-4, rtol=1e-4)
            assert recorder.num_bytes <= 1000
            recorded.append((recorder.num_recorded, graphs.num_kept))
    # The second fits beside the first. The third discards both, which then use its memory.
    assert recorded == [(1, 1), (2, 2), (3, 1), (4, 2), (5, 3), (5, 3), (5, 3)]


def test_passes_that_need_more_than_estimated_are_not_recorded_again_and_again():
    recorder = Growing()
    graphs = PassGraphs(policy(), CPU, recorder, most_bytes=1000)

    def num_bytes(shape):
        recorder.needed = {1: 300, 10: 600, 20: 5000}[number]
        return min(1000, recorder.needed)

    graphs._num_bytes = num_bytes
    with torch.no_grad():
        for number in (1, 20, 10, 1, 20, 10, 1, 20):
            (pack,) = packs(batch(num_groups=number))
            graphs(graphs.filled(pack, pack))
    assert recorder.num_recorded == 4
    assert graphs.num_kept == 3


def test_a_recorded_update_reads_nothing_on_the_host(monkeypatch):
    """On the meta device there is nothing to read, and whatever tries fails."""
    monkeypatch.setitem(_CHUNK_ELEMENTS, "meta", 2000)
    module = PolicyModule(tiny.model().to("meta"), temperature=0.7)
    graphs = PassGraphs(module, torch.device("meta"), PlainRecorder())
    (pack,) = packs(batch())
    for _ in range(2):
        made = graphs(graphs.filled(pack, pack.to(torch.device("meta"))))
        (made["logprobs"].sum() + made["entropy"].sum()).backward()
    assert all(each.grad is not None for each in module.parameters())
    with torch.no_grad():
        graphs(graphs.filled(pack, pack.to(torch.device("meta"))))


@pytest.mark.parametrize("setting", [{}, {"cuda_graphs": "off"}, {"compile": True}, {"checkpoint_activations": True}])
def test_which_engines_use_graphs(setting, monkeypatch):
    made = []
    monkeypatch.setattr(graphs_module, "CudaRecorder", lambda device: PlainRecorder())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"total_memory": 1 << 30})
    )
    module = policy()
    for num_ranks, device in ((1, "cuda"), (2, "cuda"), (1, "cpu")):
        made.append(PassGraphs.of(module, LearnerConfig(**setting), num_ranks, torch.device(device)) is not None)
    assert made == [not setting, False, False]
    assert ForwardEngine(policy(), LearnerConfig()).graphs is None


def test_filling_up_costs_at_most_a_quarter():
    for seed in range(5):
        (pack,) = packs(batch(seed, num_groups=30))
        assert PassShape.of(pack).num_tokens <= math.ceil(1.25 * (len(pack.input_ids) + 1))


def test_little_work_needs_few_shapes(monkeypatch):
    """Recording a pass takes longer than computing a small pack many times."""
    num_recorded = {}
    for least_work in (graphs_module._COARSE_WORK, 0):
        monkeypatch.setattr(graphs_module, "_COARSE_WORK", least_work)
        graphs = graphed(policy())
        drawn = [packs(batch(seed, num_groups=20 + seed % 10)) for seed in range(20)]
        num_recorded[least_work] = len({graphs.filled(pack, pack).shape for each in drawn for pack in each})
    coarse, fine = num_recorded.values()
    assert 2 * coarse <= fine
