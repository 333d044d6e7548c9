"""The learner's face, its buckets, and models that are read in parts."""

from __future__ import annotations

import json
import resource
from types import SimpleNamespace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner.test_engine import actor, engine, experience

from headwater.config.schema import AlgorithmConfig, Config, CriticConfig, LearnerConfig, LoraConfig
from headwater.core.errors import HeadwaterError, ModelError
from headwater.learner.critic import Critic
from headwater.learner.engine import ForwardEngine, TrainEngine
from headwater.learner.held import held_by
from headwater.learner.learner import LocalLearner
from headwater.learner.lora import add_adapters
from headwater.learner.packed_module import PolicyModule, ValueModule
from headwater.models import save as save_module
from headwater.models.checksum import checksum
from headwater.models.load import load_model, load_part, save_model
from headwater.models.save import WeightsToSave
from headwater.models.scored import load_critic, load_critic_part
from headwater.weights.memory import in_buckets


def learner(**parts) -> LocalLearner:
    return LocalLearner(Config(), actor(engine()), tiny.tokenizer(), **parts)


def test_what_cannot_be_computed_is_named():
    with pytest.raises(ValueError, match="compute 'logits': unknown; use one of logprobs, reference_logprobs, values"):
        learner().compute(experience(1), ["logprobs", "logits"])
    for what, setting in {
        "reference_logprobs": "kl_in_loss",
        "values": r"critic\.enabled=true",
        "reward_model": r"reward\.model",
    }.items():
        with pytest.raises(HeadwaterError, match=f"compute '{what}': this run has no model for it; set .*{setting}"):
            learner().compute(experience(1), [what])


def test_an_update_and_its_export():
    one, data = learner(), experience(1).with_columns(meta_info={"version": 0})
    before = {name: tensor.clone() for bucket in one.export() for name, tensor in bucket}
    stats = one.update(data)
    assert stats["actor/optimizer_steps"] == 1
    after = {name: tensor for bucket in one.export() for name, tensor in bucket}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert one.shapes() == {name: tuple(tensor.shape) for name, tensor in after.items()}
    assert list(one.shapes()) == list(after)
    status = one.status()
    assert (status.num_ranks, status.num_optimizer_steps, status.failure) == (1, 1, "")
    lengths = data.batch["attention_mask"].sum(dim=1)
    assert int(lengths.max()) <= status.pass_tokens + 1  # the last token of a row is not computed
    assert status.pass_tokens <= int(lengths.sum())
    assert status.forward_pass_tokens == 0
    one.compute(data, ["logprobs"])
    assert one.status().forward_pass_tokens == status.pass_tokens, "one pass for the whole batch"
    with pytest.raises(HeadwaterError, match="no critic"):
        one.export("critic")


def test_the_peak_of_an_update_is_kept_when_the_measurement_of_a_stage_forgets_it(monkeypatch):
    one, peak_kib = learner(), 5_000_000
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=peak_kib))
    one.update(experience(1).with_columns(meta_info={"version": 0}))
    peak_kib = 1_000
    [rank] = one.status().ranks
    assert rank.peak_memory_bytes == 5_000_000 * 1024


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_of_one_rank_is_that_of_its_export(compute_dtype):
    # In another type than the passes compute in, even one rank is sharded.
    critic = Critic(
        TrainEngine(
            ValueModule(load_critic("tiny:qwen3", dtype="float32", device="cpu", seed=0)),
            LearnerConfig(),
            compute_dtype=compute_dtype,
        ),
        CriticConfig(),
        AlgorithmConfig(),
        loss_width=8,
    )
    one = learner(critic=critic)
    for role in ("policy", "critic"):
        assert one.checksum(role) == checksum(each for bucket in one.export(role) for each in bucket)
    assert one.checksum("policy") != one.checksum("critic")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40))
def test_buckets_hold_every_tensor_once_and_are_small(sizes, max_bytes):
    tensors = [(f"w{place}", torch.zeros(size, dtype=torch.uint8)) for place, size in enumerate(sizes)]
    buckets = list(in_buckets(tensors, max_bytes))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in tensors]
    for bucket in buckets:
        assert bucket
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= max_bytes


def assert_same_parameters(model, expected) -> None:
    wanted = dict(expected.named_parameters())
    parameters = dict(model.named_parameters())
    assert parameters.keys() == wanted.keys()
    for name, parameter in parameters.items():
        assert torch.equal(held_by(parameter), wanted[name]), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model in one file, and the same in several with an index."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny.model(seed=5)
    save_model(model, tiny.tokenizer(), folder / "one")
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    dtypes = {name: each.dtype for name, each in model.named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "_MAX_FILE_BYTES", 2**20)
        save_model(model, tiny.tokenizer(), folder / "several", WeightsToSave(shapes, dtypes, model.named_parameters()))
    return folder, model


def test_weights_that_are_streamed_are_a_model_folder(folders):
    folder, model = folders
    index = json.loads((folder / "several" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert_same_parameters(load_model(str(folder / "several"), dtype="float32", device="cpu", seed=0), model)
    ours, theirs = (json.loads((folder / name / "config.json").read_text()) for name in ("several", "one"))
    assert ours == theirs
    for file in ("generation_config.json", "tokenizer.json"):
        assert (folder / "several" / file).read_text() == (folder / "one" / file).read_text(), file


def test_a_stream_that_is_not_what_was_announced_is_refused(tmp_path):
    model = tiny.model()
    shapes = {"model.norm.weight": (3,)}
    stream = WeightsToSave(shapes, {"model.norm.weight": torch.float32}, [("model.norm.weight", torch.zeros(4))])
    with pytest.raises(ModelError, match=r"cannot save model\.norm\.weight of shape \(4,\)"):
        save_model(model, tiny.tokenizer(), tmp_path / "model", stream)
    assert not (tmp_path / "model").exists()


def test_weights_with_other_names_than_the_model_s_are_collected_in_main_memory(tmp_path, monkeypatch):
    moved: list[str] = []

    class OnDevice:
        def detach(self):
            return self

        def to(self, device, dtype):
            moved.append(device)
            return torch.ones(2)

    class Converted:
        config = object()

        def save_pretrained(self, folder, state_dict=None):
            saved.update(state_dict or {})
            (folder / "config.json").write_text("{}")

    saved: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(save_module, "_is_converted", lambda model: True)
    stream = WeightsToSave({"a": (2,)}, {"a": torch.float32}, [("a", OnDevice())])
    save_model(Converted(), Converted(), tmp_path / "model", stream)
    assert moved == ["cpu"]
    assert saved["a"].tolist() == [1, 1]


def test_a_model_that_is_read_in_parts_is_the_model(folders):
    folder, model = folders
    for name in ("one", "several"):
        for dtype in ("float32", "bfloat16"):
            skeleton, files = load_part(str(folder / name), dtype=dtype, seed=0)
            assert all(parameter.is_meta for parameter in skeleton.parameters())
            # In another type than the passes compute in, even one rank is sharded.
            compute = torch.bfloat16 if dtype == "float32" else torch.float32
            ForwardEngine(
                PolicyModule(skeleton, 1.0),
                LearnerConfig(),
                compute_dtype=compute,
                device=torch.device("cpu"),
                weights=files,
            )
            assert_same_parameters(skeleton, load_model(str(folder / name), dtype=dtype, device="cpu", seed=0))
    built, files = load_part("tiny:qwen3", dtype="float32", seed=5)
    assert files is None
    assert_same_parameters(built, model)


def test_new_heads_and_adapters_have_the_values_of_one_rank(folders):
    folder, _ = folders
    path = str(folder / "one")
    skeleton, _ = load_part(path, dtype="float32", seed=0)
    whole = load_model(path, dtype="float32", device="cpu", seed=0)
    for model in (skeleton, whole):
        add_adapters(model, LoraConfig(rank=4), seed=7)
    expected = dict(whole.named_parameters())
    adapters = {name: each for name, each in skeleton.named_parameters() if "lora_" in name}
    assert len(adapters) > 10
    assert all(torch.equal(each, expected[name]) for name, each in adapters.items())
    critic, files = load_critic_part(path, dtype="float32", seed=0)
    ForwardEngine(
        ValueModule(critic), LearnerConfig(), compute_dtype=torch.bfloat16, device=torch.device("cpu"), weights=files
    )
    assert_same_parameters(critic, load_critic(path, dtype="float32", device="cpu", seed=0))
