"""Training a vision model through ``build_learner``: updates, frozen parts, adapters, roles, checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pictures
import pytest
import torch

from headwater.config.load import load_config
from headwater.core.data_proto import DataProto
from headwater.core.errors import ConfigError, DataError
from headwater.core.media import MediaContent
from headwater.core.records import Trajectory
from headwater.learner.build import LearnerSpec, build_learner
from headwater.learner.learner import LocalLearner
from headwater.models.load import load_model, load_processor
from headwater.models.vision import vision_parameter_names
from headwater.rollout.group import pad_trajectories

COMMON = (
    f"model.path={pictures.NAME}", "warm_start.num_steps=0", "learner.learning_rate=1e-3",
    "learner.num_warmup_steps=0", "learner.skip_zero_advantages=false", "rollout.temperature=1.0",
    "rollout.max_new_tokens=24", "data.max_prompt_tokens=64",
)  # fmt: skip
ONE, TWO = pictures.picture(1), pictures.picture(2)


def learner_of(*settings: str, path: str = pictures.NAME) -> LocalLearner:
    config = load_config("quickstart", [*COMMON, *settings]).config
    return build_learner(LearnerSpec(config, path, pictures.NAME))


def experience() -> DataProto:
    samples = [*pictures.group(1, [ONE], 2), *pictures.group(2, [TWO], 2, later=[ONE]), *pictures.group(3, [], 2)]
    data = pad_trajectories(samples, pad_token_id=0)
    mask = data.batch["response_mask"]
    advantages = torch.randn(len(samples), 1, generator=torch.Generator().manual_seed(0)) * mask
    columns = {"old_logprobs": data.batch["rollout_logprobs"], "advantages": advantages, "returns": advantages}
    return data.with_columns(tensors={**columns, "values": torch.zeros_like(mask)}, meta_info={"version": 0})


def weights_of(learner: LocalLearner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in learner.export() for name, tensor in bucket}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def test_an_update_trains_the_language_model_and_the_tower():
    learner = learner_of("algorithm.kl_in_loss=0.1", "critic.enabled=true", "algorithm.advantage=gae")
    data = experience()
    computed = learner.compute(data, ["logprobs", "reference_logprobs", "values"])
    torch.testing.assert_close(computed["logprobs"], computed["reference_logprobs"])
    data = data.with_columns(tensors={"reference_logprobs": computed["reference_logprobs"]})
    before = weights_of(learner)
    stats = [learner.update(data) for _ in range(2)]
    assert changed(before, weights_of(learner)) == before.keys()
    assert all(torch.isfinite(torch.tensor(list(each.values()))).all() for each in stats)
    # The engine, which loads the same class, finds the weights by their names.
    assert before.keys() == dict(pictures.model().named_parameters()).keys()
    after = learner.compute(data, ["logprobs", "reference_logprobs", "values"])
    assert not torch.equal(after["logprobs"], computed["logprobs"])
    assert not torch.equal(after["values"], computed["values"])
    torch.testing.assert_close(after["reference_logprobs"], computed["reference_logprobs"])


def answered(content: MediaContent, answer: int) -> Trajectory:
    [sample] = pictures.group(1, [content], 1)
    end = sample.prompt_length
    columns = {name: getattr(sample, name)[: end + 1] for name in ("loss_mask", "logprobs", "versions")}
    return replace(sample, tokens=(*sample.tokens[:end], answer), **columns)


def test_supervised_updates_learn_to_name_a_picture():
    """Two pictures with equal prompts and different answers: the loss can only fall if the picture is seen."""
    learner = learner_of("warm_start.learning_rate=3e-3")
    samples = [answered(ONE, 20), answered(TWO, 30)]
    assert samples[0].tokens[:-1] == samples[1].tokens[:-1]
    data = pad_trajectories(samples, 0)
    losses = [learner.supervise(data)["loss"]]
    while losses[-1] > 0.1 and len(losses) < 60:
        losses.append(learner.supervise(data)["loss"])
    assert losses[0] > 2.0
    assert losses[-1] < 0.1, "guessing between two answers costs 0.69"


def test_a_frozen_tower_does_not_change_and_has_no_optimiser_state():
    learner = learner_of("learner.freeze=[vision]")
    engine = learner.actor.engine
    frozen = vision_parameter_names(engine.module.model)
    before = weights_of(learner)
    learner.update(experience())
    assert changed(before, weights_of(learner)) == before.keys() - frozen
    with_state = {id(each) for optimizer in engine.optimizer.optimizers for each in optimizer.state}
    named = dict(engine.module.model.named_parameters())
    assert {name for name, each in named.items() if id(each) in with_state} == before.keys() - frozen
    assert not any(name.startswith("model.") and name[6:] in frozen for name in engine.shards().tensors)


def test_parts_that_cannot_be_frozen_are_refused():
    with pytest.raises(ConfigError, match=r"learner\.freeze = \[tower\] .*no such choice; known: vision"):
        load_config("quickstart", ["learner.freeze=[tower]"])
    config = load_config("quickstart", ["learner.freeze=[vision]", "model.path=tiny:qwen3"]).config
    with pytest.raises(ConfigError, match=r"learner\.freeze = \[vision\]: this qwen3 model reads only text"):
        build_learner(LearnerSpec(config, "tiny:qwen3", "tiny:qwen3"))
    with pytest.raises(ConfigError, match=r"lora\.targets = .*names layers of the vision tower"):
        learner_of("learner.freeze=[vision]", "lora.rank=2", "lora.targets=[qkv]")


def test_adapters_are_those_of_the_language_model():
    learner = learner_of("lora.rank=4", "algorithm.kl_in_loss=0.1")
    data = experience()
    before = weights_of(learner)
    reference = learner.compute(data, ["reference_logprobs"])
    learner.update(data.with_columns(tensors=reference))
    names = changed(before, weights_of(learner))
    assert names
    assert all(".language_model.layers." in name for name in names)
    torch.testing.assert_close(learner.compute(data, ["reference_logprobs"]), reference)
    assert changed(before, dict(pictures.model().named_parameters())) == set()


def test_the_first_layer_passes_gradients_on_in_every_pass_if_the_tower_has_adapters():
    """FSDP reduces a layer whose inputs have no gradient later. Passes of other ranks may have pictures."""
    targets = "lora.targets=[down_proj, visual.blocks.0.attn.qkv]"
    learner = learner_of("lora.rank=4", targets)
    module, seen = learner.actor.engine.module, []
    module.register_forward_pre_hook(lambda _, inputs: seen.append([inputs[0].media is not None]))
    module.layers[0].register_forward_pre_hook(lambda _, inputs: seen[-1].append(inputs[0].requires_grad))
    data, before = experience(), weights_of(learner)
    learner.update(data)
    learner.update(data[4:])  # without pictures
    assert seen == [[True, True], [False, True]]
    assert any("visual" in name for name in changed(before, weights_of(learner)))
    seen.clear()
    learner.compute(data, ["logprobs"])
    assert seen == [[True, False]]


def test_a_text_model_refuses_pictures():
    config = load_config("quickstart", [*COMMON, "model.path=tiny:qwen3"]).config
    learner = build_learner(LearnerSpec(config, "tiny:qwen3", "tiny:qwen3"))
    with pytest.raises(DataError, match="row 0 of the batch has images or videos, but this qwen3 model reads only"):
        learner.compute(experience(), ["logprobs"])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("lora.rank=4",), marks=pytest.mark.slow),
        ("learner.freeze=[vision]", "trainer.checkpoint_dtype=bfloat16"),
    ],
)
def test_a_resumed_learner_continues_to_the_bit(tmp_path, settings):
    learner, data = learner_of(*settings), experience()
    learner.update(data)
    learner.save(tmp_path / "saved")
    snapshot = learner.snapshot(tmp_path / "copied")
    learner.update(data)
    snapshot.write()
    expected = weights_of(learner)
    for name in ("saved", "copied"):
        folder = tmp_path / name
        other = learner_of(*settings, path=str(folder / "model"))
        other.load(folder)
        other.update(data)
        assert changed(expected, weights_of(other)) == set(), name
    # The exported folder is a whole model, with which others can read pictures.
    exported = load_model(str(tmp_path / "copied" / "model"), dtype="float32", device="cpu", seed=0)
    assert dict(exported.named_parameters()).keys() == expected.keys()
    processor = load_processor(str(tmp_path / "copied" / "model"))
    assert processor is not None
    text = processor.family.placeholder("image") + "what?"
    assert processor.encode(text, [ONE]) == pictures.processor().encode(text, [ONE])
