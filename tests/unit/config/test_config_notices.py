"""What has no effect although someone asked for it is reported; other settings are not."""

from __future__ import annotations

from headwater.config.keys import settings
from headwater.config.load import load_config
from headwater.config.notices import config_notices, eval_notices
from headwater.config.schema import Config


def notices(*overrides: str, automatic: str | None = "cpu", resolved: bool = False) -> list[str]:
    loaded = load_config(None, ("model.path=tiny:qwen3", "data.train=arithmetic", *overrides))
    given = frozenset(settings(Config)) if resolved else loaded.given
    return [str(each) for each in config_notices(loaded.config, given, automatic)]


def test_settings_for_gpus_are_named_on_a_cpu():
    assert notices() == []
    for override in ("engine.overlap=true", "engine.overlap=false", "learner.offload_optimizer=true"):
        subject = override.replace("=", " = ")
        assert notices(override) == [f"{subject}: has no effect on a CPU (model.device = auto)"]
        assert notices(override, "model.device=cpu", automatic="cuda") == [
            f"{subject}: has no effect on a CPU (model.device = cpu)"
        ]
        assert notices(override, automatic="cuda") == []
        assert notices(override, automatic=None) == [f"{subject}: has no effect if model.device = auto finds no GPU"]
    separate = ("engine.overlap=false", "rollout.placement=disaggregated", "rollout.device=cuda:1")
    assert notices(*separate) == []
    assert notices("engine.overlap=true", resolved=True) == []  # a resolved recipe gives every key


def test_processes_that_a_launcher_started_separately_are_told(monkeypatch):
    for variable, program in (("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")):
        monkeypatch.setenv(variable, "1")
        assert notices() == []
        monkeypatch.setenv(variable, "4")
        (said,) = notices()
        assert said.startswith(f"{variable} = 4: {program} has started 4 independent runs")
        with monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", "4")  # of torchrun, whose ranks know of each other
            assert notices() == []
        monkeypatch.delenv(variable)


def test_settings_that_an_evaluation_does_not_read_are_named():
    read = ["eval.temperature=1", "rollout.max_new_tokens=9", "reward.function=x.py:f", "trainer.num_threads=2"]
    assert list(eval_notices(read)) == []
    for ignored, remedy in {
        "rollout.temperature=0.3": "; set eval.temperature",
        "rollout.num_samples_per_prompt=4": "; set eval.num_samples_per_prompt",
        "learner.learning_rate=0.5": "",
        "trainer.trackers=[jsonl]": "",
    }.items():
        (said,) = eval_notices([*read, ignored])
        assert str(said) == f"{ignored}: is for training and has no effect here{remedy}"


def test_an_interpolation_between_equal_policies_is_said():
    decoupled = ("algorithm.policy_loss=decoupled", "algorithm.old_logprobs=loglinear")
    (said,) = notices(*decoupled)
    assert "algorithm.old_logprobs = loglinear: is the same as rollout with rollout.max_staleness = 0" in said
    assert notices(*decoupled, "rollout.max_staleness=1") == []


def test_a_forgotten_model_or_task_is_said():
    def said(*overrides: str) -> list[str]:
        loaded = load_config(None, overrides)
        return [each.subject for each in config_notices(loaded.config, loaded.given, "cpu")]

    assert said("trainer.total_steps=3") == ["model.path is not given", "data.train is not given"]
    assert said("data.train=largest_digit") == ["model.path is not given"]
    assert said("model.path=tiny:llama") == ["data.train is not given"]
    assert said("model.path=tiny:llama", "data.dataset=mine.py:Rows") == []
    assert said() == []  # all defaults, as `headwater config` shows them; a resumed run gives none either


def test_what_the_number_of_ranks_a_running_ray_or_vllm_on_a_cpu_makes_idle_is_said(monkeypatch):
    def subjects(*overrides):
        loaded = load_config("quickstart", overrides)
        return {each.subject for each in config_notices(loaded.config, loaded.given, "cpu")}

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    at_once = "learner.convert_at_once=true"
    two = ["cluster=ray", "cluster.learner.num_ranks=2", "cluster.object_store_mib=100"]
    # On this CPU, it has no effect either.
    assert "there are 2 ranks" in told("learner.convert_at_once = true", at_once, *two)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "there are 4 ranks" in told("learner.convert_at_once = true", at_once)
    assert "cluster.object_store_mib = 100" not in subjects(*two)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "cluster.object_store_mib = 100" in subjects(*two)
    assert "engine.memory_fraction = 0.5" in subjects("rollout.backend=vllm", "engine.memory_fraction=0.5")
    assert "engine.memory_fraction = 0.5" not in subjects("engine.memory_fraction=0.5")


def test_nccl_is_named_where_auto_sends_weights_between_machines_through_main_memory():
    def said(*overrides, automatic="cuda", between_machines="collective"):
        loaded = load_config("quickstart", ["cluster=ray", "rollout.placement=disaggregated", *overrides])
        notices = config_notices(loaded.config, loaded.given, automatic, between_machines)
        return [each.text for each in notices if each.subject == "rollout.weight_transfer = auto"]

    (text,) = said()
    assert "through main memory; rollout.weight_transfer=collective rollout.weight_link=nccl sends" in text
    assert said(between_machines=None) == [], "one machine"
    assert said("rollout.backend=vllm", between_machines="file") == []
    assert said("rollout.backend=sglang") == [], "the sender has no GPU"
    assert said(automatic="cpu") == said("rollout.device=cpu") == said("rollout.placement=colocated") == []
    assert said("rollout.weight_link=gloo") == [], "chosen by the user"


def test_a_limit_of_passes_that_a_run_does_not_make_is_said():
    key, passes = "learner.max_tokens_per_forward_pass", "trainer.save_learner_logprobs=false"
    assert "no pass without gradients" in told(f"{key} = 4096", f"{key}=4096", passes)
    for setting in (
        "algorithm.old_logprobs=recompute",
        "algorithm.kl_in_reward=0.1",
        "trainer.save_learner_logprobs=true",
    ):
        assert not told(f"{key} = 4096", f"{key}=4096", passes, setting)


def told(subject, *overrides):
    loaded = load_config("quickstart", overrides)
    notices = config_notices(loaded.config, loaded.given, "cpu")
    return " ".join(each.text for each in notices if each.subject == subject)
