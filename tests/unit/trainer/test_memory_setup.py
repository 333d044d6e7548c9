"""The memory plan of a run: the sizes of its models, what its settings allow, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2Config

from headwater import train
from headwater.config.load import load_config
from headwater.core.errors import ConfigError, DeviceMemoryFull, ModelError
from headwater.core.memory_plan import GIB, MOVED, RELEASED, RESIDENT, STREAMED
from headwater.engine.engine import Engine
from headwater.models.load import load_model
from headwater.models.memory_sizes import CACHE_BYTES, GPU_TOWER_BYTES, GRAPHS_SHARE, ModelSize
from headwater.models.scored import load_critic
from headwater.trainer import memory_advice, memory_setup
from headwater.trainer.memory_advice import Known, advised, memory_full
from headwater.trainer.memory_setup import (
    Models,
    budget_of,
    check_fits,
    describe_plan,
    is_planned,
    plan_memory,
    plan_run,
    planned,
    savings,
)

SHAPE = [
    "model.dtype=bfloat16", "model.device=cpu", "data.max_prompt_tokens=128", "rollout.max_new_tokens=512",
    "rollout.num_samples_per_prompt=8", "trainer.num_prompts_per_step=32", "learner.residency=[auto]",
]  # fmt: skip
CHECKPOINTED = "learner.checkpoint_activations=true"


@pytest.fixture(scope="module")
def seven():
    """The shape of Qwen2.5-7B."""
    config = Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=False,
    )  # fmt: skip
    return Models(ModelSize.of_config(config), {})


@pytest.fixture(scope="module")
def seeing():
    """The shape of Qwen2.5-VL-3B."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        },
        vision_config={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                       "out_hidden_size": 2048},
        tie_word_embeddings=True,
    )  # fmt: skip
    return Models(ModelSize.of_config(config), {})


def plan_of(models: Models, *settings: str, gpu: float = 139, ram: float = 125, can_discard: bool = True):
    config = load_config(None, [*SHAPE, *settings]).config
    budget = budget_of(config, int(gpu * GIB), int(ram * GIB))
    return plan_memory(config, models, budget, can_discard=can_discard), config


def test_sizes_are_those_of_the_loaded_model():
    model = load_model("tiny:qwen3", dtype="float32", device="cpu", seed=0)
    size = ModelSize.read("tiny:qwen3")
    assert size == ModelSize.of(model)
    assert size.num_parameters == sum(each.numel() for each in model.parameters())


def test_activations_are_near_the_measured_peaks(seven):
    # benchmarks/results/train_step_qwen2.5-7b_h200.json: 65.4 GiB, of which weights and gradients 56.7.
    # Measured before the residual stream and the logits were float32: layer inputs and chunks are twice as large now.
    wider = 2 * 8192 * 28 * 3584 / GIB + 2
    measured = 65.39 - 8 * seven.policy.num_parameters / GIB + wider
    estimated = seven.policy.activation_bytes(8192, 2, is_checkpointed=True) / GIB
    assert estimated == pytest.approx(measured, rel=0.1)
    # The same file: 21.5 GiB with adapters of rank 32, of which the frozen weights are 14.2 GiB.
    adapters = seven.policy.adapter_parameters(32, ()) * 16
    measured = 21.51 - (2 * seven.policy.num_parameters + adapters) / GIB + wider
    estimated = seven.policy.activation_bytes(8192, 2, is_checkpointed=True, trains_all=False) / GIB
    assert estimated == pytest.approx(measured, rel=0.15)


def test_a_small_batch_needs_little_however_large_a_pass_may_be(seven):
    small, _ = plan_of(seven, "trainer.num_prompts_per_step=1", "rollout.num_samples_per_prompt=2")
    large, _ = plan_of(seven, CHECKPOINTED)
    assert small.holders["activations"].train < large.holders["activations"].train


def test_a_7b_model_trains_on_one_gpu_of_139_gib_without_moving_anything(seven):
    plan, config = plan_of(seven, CHECKPOINTED)
    assert plan.moved == 0
    assert plan.ways["optimizer"] == plan.ways["parameters"] == RESIDENT
    assert plan.ways["weights"] == plan.ways["kv_cache"] == RELEASED
    built = planned(config, plan)
    assert built.engine.kv_cache_gib == pytest.approx(plan.kv_cache / GIB)
    assert not built.learner.offload_optimizer
    assert built.engine.keep_addresses, "CUDA graphs stay valid while the cache is released"


def test_settings_are_orders(seven):
    plan, _ = plan_of(seven, CHECKPOINTED, "learner.offload_during_rollout=true", "learner.offload_optimizer=true")
    assert (plan.ways["parameters"], plan.ways["optimizer"], plan.ways["kv_cache"]) == (MOVED, STREAMED, RELEASED)
    plan, _ = plan_of(seven, CHECKPOINTED, "learner.residency=[optimizer, kv_cache]", "engine.kv_cache_gib=20")
    assert [tag for tag, way in plan.ways.items() if way != RESIDENT] == ["optimizer", "kv_cache"]
    assert plan.kv_cache == 20 * GIB
    plan, _ = plan_of(seven, CHECKPOINTED, "learner.residency=[parameters]", gpu=150, ram=200)
    assert (plan.ways["parameters"], plan.ways["optimizer"], plan.ways["kv_cache"]) == (MOVED, MOVED, RESIDENT)


def test_without_fixed_addresses_the_weights_stay(seven):
    plan, _ = plan_of(seven, CHECKPOINTED, can_discard=False)
    assert plan.ways["weights"] == RESIDENT
    assert plan.ways["optimizer"] == STREAMED


def test_averages_are_streamed_if_training_runs_beside_generation(seven):
    plan, config = plan_of(seven, CHECKPOINTED, "rollout.max_staleness=1")
    assert {tag for tag, way in plan.ways.items() if way != RESIDENT} == {"optimizer"}
    built = planned(config, plan)
    assert built.learner.offload_optimizer
    assert not built.engine.keep_addresses, "nothing of the engine is released"


def test_a_run_that_cannot_fit_is_refused_with_numbers_and_remedies(seven):
    with pytest.raises(ConfigError) as error:
        plan_of(seven, gpu=44)
    text = str(error.value)
    assert "training needs at least" in text
    assert "44 GiB are free" in text
    assert "learner.checkpoint_activations=true: saves" in text
    assert "lora.rank=16" in text
    assert "learner.offload_optimizer" not in text, "the plan has streamed the averages already"
    with pytest.raises(ConfigError, match=r"main memory need .* and 10 GiB of it can be used"):
        plan_of(seven, CHECKPOINTED, "learner.offload_optimizer=true", ram=10)


def test_a_run_without_a_plan_is_refused_if_it_cannot_fit_as_it_is(seven):
    def check(*settings: str, gpu: float = 139) -> None:
        config = load_config(None, [*SHAPE, "learner.residency=[resident]", *settings]).config
        check_fits(config, seven, budget_of(config, int(gpu * GIB), 125 * GIB), can_discard=True)

    with pytest.raises(ConfigError) as error:
        check(CHECKPOINTED)
    text = str(error.value)
    # 14.2 GiB of the engine's weights, 113.5 of the learner's with gradients and averages, and a cache of 35 GiB: 1,024
    # sequences of 640 tokens, which is less than 40% of the rest.
    assert "training needs at least 163 GiB of GPU memory, and 139 GiB are free: 24 GiB are missing" in text
    assert "optimizer 57 GiB" in text
    assert "learner.residency=[auto] (releases what is not needed; nothing is copied): needs 129 GiB" in text
    assert "learner.offload_optimizer=true: saves 5" in text, "all but the buckets that pass through"
    assert "engine.kv_cache_gib=17.5: saves 18 GiB" in text
    assert "max_tokens_per_microbatch" not in text, "it reduces an estimate"
    for settings in (["learner.offload_optimizer=true"], ["engine.kv_cache_gib=8"], ["lora.rank=16"]):
        check(*settings)
    check("learner.offload_optimizer=true", "learner.offload_during_rollout=true", gpu=85)
    with pytest.raises(ConfigError, match="50 GiB are free"):
        check("learner.offload_optimizer=true", "learner.offload_during_rollout=true", gpu=50)


def test_a_critic_counts_as_it_is_trained():
    """After its update its gradients are gone, and it has no output layer."""
    shape = Qwen2Config(
        vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    own = ModelSize.of_config(shape)
    config = load_config(None, [*SHAPE, "critic.enabled=true", "algorithm.advantage=gae"]).config
    with_critic = Models(own, {"critic": own}).sizes(config)
    scoring = own.num_parameters - 64 * 1000
    assert with_critic.parameters == 4 * (own.num_parameters + scoring)
    assert with_critic.optimizer == 8 * (own.num_parameters + scoring)
    assert with_critic.gradients == 4 * own.num_parameters
    critic = load_critic("tiny:qwen3", dtype="float32", device="cpu", seed=0)
    tied = ModelSize.read("tiny:qwen3")
    assert sum(each.numel() for each in critic.parameters()) == tied.num_scoring_parameters + tied.hidden_size


def test_a_small_run_without_a_plan_is_never_refused():
    for models, free in ((small(49152, 576, 1536, 30, 9, 3), 7.3), (small(151936, 896, 4864, 24, 14, 2), 16)):
        config = load_config(None, ["model.dtype=bfloat16", "model.device=cpu"]).config
        check_fits(config, models, budget_of(config, int(free * GIB), 32 * GIB), can_discard=True)


def test_a_run_whose_estimate_does_not_fit_starts_with_a_warning(seven):
    plan, _ = plan_of(seven)
    assert not plan.fits
    assert plan.moved == 0, "an estimate does not make a run slow"
    assert plan.ways["weights"] == plan.ways["kv_cache"] == RELEASED, "what costs nothing over the bus is done"
    assert "may run out of memory" in describe_plan(plan)
    assert "may run out of memory" not in describe_plan(plan_of(seven, CHECKPOINTED)[0])


def small(vocab_size: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> Models:
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True,
    )  # fmt: skip
    return Models(ModelSize.of_config(config), {})


@pytest.mark.parametrize("recipe", ["smollm2-arithmetic", "smollm2-countdown"])
def test_small_models_run_on_small_gpus_without_moving_anything(recipe):
    models = small(49152, 576, 1536, 30, 9, 3)
    config = load_config(recipe, ["model.dtype=bfloat16", "model.device=cpu", "learner.residency=[auto]"]).config
    for gpu in (7.3, 11.0, 15.0):
        plan = plan_memory(config, models, budget_of(config, int(gpu * GIB), 32 * GIB), can_discard=True)
        assert plan.moved == 0, gpu
        assert plan.kv_cache > GIB // 4, "not one response at a time"


def test_estimates_do_not_refuse_a_run(seven):
    half = small(151936, 896, 4864, 24, 14, 2)
    config = load_config(None, ["model.dtype=bfloat16", "model.device=cpu", "learner.residency=[auto]"]).config
    assert plan_memory(config, half, budget_of(config, int(11.5 * GIB), 32 * GIB), can_discard=True).moved == 0
    plan, _ = plan_of(seven, CHECKPOINTED, "learner.offload_optimizer=true", ram=60)
    assert plan.ways["optimizer"] == STREAMED, "57 GiB of copies may fit"


def test_samples_that_share_their_prompt_hold_it_once(seven):
    few = ["trainer.num_prompts_per_step=1", "rollout.max_new_tokens=16"]
    shared, apart = (
        plan_of(seven, *few, f"learner.share_prompts={value}")[0].holders["activations"].train
        for value in ("true", "false")
    )
    assert shared < apart


def test_the_cache_of_a_roomy_gpu_is_the_one_without_a_plan(seven):
    plan, config = plan_of(seven, CHECKPOINTED, "lora.rank=16")
    left = 139 * GIB - sum(max(each.generate, 0) for tag, each in plan.holders.items() if tag in LEFT_OUT)
    assert plan.kv_cache == pytest.approx(0.4 * left, rel=0.01)
    assert plan.converts_at_once, "adapters have working copies too"
    assert planned(config, plan).learner.convert_at_once


def test_passes_are_recorded_only_if_weights_stay_and_memory_is_left(seven):
    roomy, config = plan_of(seven, CHECKPOINTED, "lora.rank=16")
    assert planned(config, roomy).learner.cuda_graphs == "auto"
    moving, config = plan_of(seven, CHECKPOINTED, "learner.residency=[parameters]")
    assert moving.ways["parameters"] != "resident"
    assert planned(config, moving).learner.cuda_graphs == "off"
    full = replace(roomy, budget=replace(roomy.budget, device=roomy.peak + roomy.budget.reserve))
    assert planned(config, full).learner.cuda_graphs == "off"


LEFT_OUT = ("weights", "activations", "graphs")


def test_what_a_setting_saves_is_what_the_sizes_say(seven):
    config = load_config(None, SHAPE).config
    lines = dict(line.rsplit(": saves ", 1) for line in savings(config, seven))
    assert lines["learner.offload_optimizer=true"] == "57 GiB"
    assert any(key.startswith("learner.max_tokens_per_microbatch=8192") for key in lines)


def test_adapters_need_hardly_more_than_the_frozen_weights(seven):
    plan, _ = plan_of(seven, CHECKPOINTED, "lora.rank=16", gpu=70)
    assert plan.moved == 0
    assert plan.holders["optimizer"].train < GIB
    assert 14 * GIB < plan.holders["parameters"].train < 15 * GIB


def test_a_plan_is_for_an_engine_and_a_learner_on_one_gpu():
    assert not is_planned(load_config(None, ["model.device=cpu", "learner.residency=[auto]"]).config)


def test_a_run_on_one_gpu_gets_a_plan_unless_it_says_that_everything_stays(monkeypatch):
    monkeypatch.setattr(memory_setup, "resolve_device", lambda _: torch.device("cuda"))

    def asks(*settings: str) -> bool:
        return is_planned(load_config(None, list(settings)).config)

    assert asks()
    assert asks("learner.offload_during_rollout=true", "learner.offload_optimizer=true")
    assert asks("learner.residency=[optimizer]")
    assert not asks("learner.residency=[resident]")
    assert not asks("learner.residency=[resident]", "learner.offload_optimizer=true"), "works without a plan"
    assert not asks("rollout.placement=disaggregated")
    config = load_config(None, ["learner.residency=[resident]"]).config
    assert plan_run(config, "/no/such/model") is None
    assert planned(config, None) is config, "the engine and the learner get the settings as they are"


def test_what_leaves_is_not_named_for_several_ranks_without_effect():
    config = load_config(None, ["model.device=cpu", "learner.residency=[optimizer]"]).config
    assert plan_run(config, "/no/such/model") is None, "a notice says that a CPU does not read it"
    with pytest.raises(ConfigError, match=r"learner\.residency = \[optimizer\].*learner\.offload_optimizer=true"):
        plan_run(config, "/no/such/model", num_ranks=2)


def test_a_run_that_fits_moves_nothing_and_keeps_room_for_recorded_passes():
    models = small(151936, 1536, 8960, 28, 12, 2)  # the shape of Qwen2.5-1.5B
    plan, config = plan_of(models)
    assert set(plan.ways.values()) == {RESIDENT}
    built = planned(config, plan)
    assert built.learner.residency == (RESIDENT,)
    assert built.learner.cuda_graphs == "auto"
    assert plan.peak + plan.budget.reserve + GRAPHS_SHARE * plan.budget.device <= plan.budget.device
    # Without them, the cache grows to what it gets without a plan, or to what is left.
    greedy, _ = plan_of(models, "learner.cuda_graphs=off")
    assert greedy.kv_cache > plan.kv_cache
    assert greedy.fits
    # A cache that the responses need is not made smaller for them.
    tight, config = plan_of(models, "trainer.num_prompts_per_step=128", gpu=80)
    assert tight.kv_cache >= memory_setup.cache_of(config, models.sizes(config), tight.budget).needed
    assert planned(config, tight).learner.cuda_graphs == "off"


@pytest.mark.parametrize("residency", [["auto"], ["kv_cache", "parameters", "optimizer"]], ids=str)
def test_a_run_follows_its_plan(residency, tmp_path, monkeypatch, capsys):
    """The way of a run on a GPU, on a CPU, where averages stay and nothing has fixed addresses."""
    monkeypatch.setattr(memory_setup, "is_planned", lambda *_: True)
    calls: list[str] = []
    for name in ("sleep", "wake"):
        original = getattr(Engine, name)
        monkeypatch.setattr(
            Engine, name, lambda self, tags, name=name, original=original: (calls.append(name), original(self, tags))[1]
        )
    result = train(
        model="tiny:qwen3", data={"train": "largest_digit"},
        run={"root": str(tmp_path)}, learner={"residency": residency}, eval={"before": False, "after": False},
        rollout={"num_samples_per_prompt": 2, "max_new_tokens": 4}, engine={"kv_cache_gib": 0.01},
        trainer={"total_steps": 2, "num_prompts_per_step": 2},
    )  # fmt: skip
    assert "Memory of the GPU:" in capsys.readouterr().out
    released = "kv_cache" in residency
    assert calls == (["sleep", "wake", "sleep", "wake", "sleep"] if released else [])
    config = load_config(str(result.path / "config.yaml")).config
    assert config.learner.residency == tuple(residency), "a resumed run makes its own plan"
    assert not config.learner.offload_optimizer
    assert not config.engine.keep_addresses


def test_pictures_are_part_of_the_plan(seven, seeing):
    assert "pictures" not in plan_of(seven, CHECKPOINTED)[0].holders
    plan, _ = plan_of(seeing, CHECKPOINTED)
    # Of each of 32 blocks, three matrices of 1280 by 3420, filled up to 3456, in bfloat16.
    copies = 32 * 3 * 1280 * 3456 * 2
    pictures = plan.holders["pictures"]
    assert pictures.train == CACHE_BYTES + copies
    assert pictures.generate == CACHE_BYTES + copies + GPU_TOWER_BYTES
    configs = (load_config(None, [*SHAPE, *more]).config for more in ((), ("learner.freeze=[vision]",)))
    trained, frozen = map(seeing.sizes, configs)
    # 4096 tokens of prompts may stand for pictures: four patches of 1280 numbers each, kept 25 times in 32 blocks.
    kept = 4096 * 4 * 1280 * 25 * 32 * 2
    saved = trained.activations - frozen.activations
    assert saved == pytest.approx(kept + copies + 4096 * 4 * 1176 * 6, rel=1e-6)


def test_pictures_do_not_refuse_what_may_work(seeing):
    plan, _ = plan_of(seeing, gpu=40)
    assert not plan.fits
    assert plan.holders["pictures"].generate > CACHE_BYTES + GPU_TOWER_BYTES


def test_pictures_leave_less_for_the_cache(seeing):
    blind = Models(replace(seeing.policy, tower=None), {})
    less, more = (plan_of(each, "engine.memory_fraction=0.5", CHECKPOINTED)[0].kv_cache for each in (seeing, blind))
    assert more - less == pytest.approx((CACHE_BYTES + GPU_TOWER_BYTES + 32 * 3 * 1280 * 3456 * 2) / 2, abs=1)


def test_a_vision_model_is_advised_smaller_pictures_and_a_frozen_tower(seeing):
    config = load_config(None, SHAPE).config
    lines = dict(line.rsplit(": saves ", 1) for line in savings(config, seeing))
    assert any(key.startswith("learner.freeze=[vision]") for key in lines)
    told = str(memory_full(MemoryError("no memory"), "train", config, {}, None, Known(seeing)))
    assert "data.max_image_pixels=524288 (now 1048576)" in told
    [line] = [each for each in told.splitlines() if "learner.freeze=[vision]" in each]
    assert re.search(r"saves 7.5 GiB of gradients and averages; saves about \d+ GiB by estimate$", line), line
    frozen = load_config(None, [*SHAPE, "learner.freeze=[vision]"]).config
    assert "freeze" not in str(memory_full(MemoryError("no memory"), "train", frozen, {}, None, Known(seeing)))
    generation = str(memory_full(MemoryError("no memory"), "wait", config, {}, None, Known(seeing)))
    assert "pictures 4.1 GiB" in generation


def test_an_error_about_memory_names_the_largest_holders(seven):
    plan, config = plan_of(seven, CHECKPOINTED)
    shapes = {"embedding": (152064, 3584)}
    training = str(memory_full(MemoryError("no memory"), "train", config, shapes, plan))
    assert "optimizer 57 GiB, parameters 28 GiB, gradients 28 GiB" in training
    assert "out of memory while updating the policy" in training
    generation = str(memory_full(MemoryError("no memory"), "wait", config, shapes, plan))
    assert "gradients" not in generation.partition("These settings")[0]


def test_without_a_plan_the_sizes_name_the_largest_holders_and_what_each_setting_saves(seven, monkeypatch):
    monkeypatch.setattr(memory_advice, "_uses_gpu", lambda *_: True)
    config = load_config(None, [*SHAPE, "learner.residency=[resident]"]).config
    known = Known(seven, cache_bytes=40 * GIB)

    def told(stage: str, config=config, known=known) -> str:
        return str(memory_full(MemoryError("no memory"), stage, config, {}, None, known))

    training = told("train")
    assert "7616 million weights" in training
    assert re.search(r"By their sizes, the largest holders are: activations \d+ GiB, optimizer 57 GiB, kv ", training)
    for setting in ("learner.max_tokens_per_microbatch=8192", "learner.checkpoint_activations=true"):
        [line] = [each for each in training.splitlines() if setting in each]
        assert re.search(r"saves about [\d.]+ GiB by estimate$", line), line
    assert "frees half of the KV cache (20 GiB)" in training
    generation = told("wait")
    assert "gradients" not in generation
    assert "halves the KV cache, which frees 20 GiB" in generation
    assert "engine.max_sequences" not in generation, "256 responses are generated at once"
    small = load_config(None, [*SHAPE, "learner.residency=[resident]", "engine.max_sequences=64"]).config
    assert re.search(r"engine.max_sequences=32 \(now 64\).*saves about \d+ MiB by estimate", told("wait", small))
    assert re.search(r"engine.max_prefill_tokens=.*saves about [\d.]+ [MG]iB by estimate", generation)
    assert "activations" not in told("publish").partition("These settings")[0]
    loading = told("load_engine").partition("These settings")[0]
    assert "kv cache 40 GiB, weights 14 GiB" in loading
    assert "optimizer" not in loading, "there is no learner yet"
    assert "optimizer 28 GiB" in told("train", known=Known(seven, num_ranks=2))
    assert "on each of 2 ranks" in told("train", known=Known(seven, num_ranks=2))
    # Packs are evened out: 18,000 tokens are two packs of 9,000, and half of the setting makes three of 6,000.
    even = told("train", known=Known(seven, pass_tokens=9000))
    assert "learner.max_tokens_per_microbatch=4500 (now 16384, and passes had up to 9000 tokens): activations" in even
    assert "shrink to 50%" in even
    [forward] = [each for each in told("experience", known=Known(seven, forward_pass_tokens=9000)).splitlines()
                 if "learner.max_tokens_per_forward_pass=4500 (now 65536, and passes" in each]  # fmt: skip
    assert "a pass needs 50% of its memory" in forward
    held = told("train", known=Known(seven, pass_tokens=9000, recorded_bytes=50 * GIB))
    assert "recorded passes 50 GiB" in held
    first = held.partition("then resume")[2].splitlines()[1]
    assert first.startswith("  - learner.cuda_graphs=off: ")
    assert first.endswith("the graphs hold 50 GiB now")
    assert "the graphs hold 50 GiB now" in told("wait", known=Known(seven, recorded_bytes=50 * GIB))
    assert "learner.cuda_graphs" not in told("wait"), "there are none"
    away = load_config(None, [*SHAPE, "learner.residency=[resident]", "learner.offload_during_rollout=true"]).config
    assert "optimizer" not in told("wait", away).partition("These settings")[0], "it is in main memory"


def test_memory_that_runs_out_before_the_first_step_is_told_with_settings(seven, monkeypatch):
    monkeypatch.setattr(Models, "read", lambda *_: seven)
    config = load_config(None, [*SHAPE, "learner.residency=[resident]"]).config
    with pytest.raises(DeviceMemoryFull) as error, advised("load_engine", config):
        raise ModelError("no room for the weights") from torch.OutOfMemoryError("CUDA out of memory. Tried 14 GiB")
    text = str(error.value)
    assert text.startswith("out of memory while loading the engine (no room for the weights). ")
    assert "weights 14 GiB" in text
    assert "change one, then start again:\n  - engine.memory_fraction=0.2" in text
    with pytest.raises(ModelError, match=r"^another$"), advised("load_engine", config):
        raise ModelError("another")


def test_sizes_that_cannot_be_read_do_not_hide_the_error(tmp_path):
    config = load_config(None, [*SHAPE, f"model.path={tmp_path}"]).config
    assert Known.of(config) is None
    with (
        pytest.raises(DeviceMemoryFull, match="out of memory while loading the learner"),
        advised("load_learner", config),
    ):
        raise MemoryError("no memory")


def test_an_error_about_memory_advises_nothing_that_the_plan_does_already(seven, monkeypatch):
    monkeypatch.setattr(memory_advice, "_uses_gpu", lambda *_: True)
    shapes = {"embedding": (152064, 3584)}

    def advised(*settings: str, **machine: float) -> str:
        plan, config = plan_of(seven, CHECKPOINTED, *settings, **machine)
        return str(memory_full(MemoryError("no memory"), "train", config, shapes, plan)).partition("These settings")[2]

    assert "learner.offload_optimizer=true" in advised()
    assert "KV cache" not in advised(), "the plan has released it"
    streaming = advised("rollout.max_staleness=1")
    assert "learner.offload_optimizer" not in streaming
    assert "frees half of the KV cache" in streaming
