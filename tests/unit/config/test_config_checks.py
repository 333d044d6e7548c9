"""Settings that clash with one another, and settings that nothing would read."""

from __future__ import annotations

from headwater.backends.native.places import engine_arguments
from headwater.cli.serve import read_engine_config
from headwater.config.explain import to_yaml
from headwater.config.load import load_config

FILES = "data.train=[rows.parquet]"
OWN = "rollout.placement=disaggregated"
CRITIC = ("critic.enabled=true", "algorithm.advantage=gae")


CLASHES = [
    (["tools.use=[calculator]"], "tools.use = [calculator]", ["rlvr calls no tools", "rollout.workflow=tool_agent"]),
    (["tools.timeout_s=3"], "tools.timeout_s = 3", ["nothing reads this", "name no tools"]),
    (["rollout.workflow=tool_agent"], "rollout.workflow = 'tool_agent'", ["needs tools; name some in tools.use"]),
    (
        ["learner.num_minibatches=5"],
        "learner.num_minibatches = 5 (command line)",
        ["trainer.num_prompts_per_step = 32; use 4, or trainer.num_prompts_per_step=30"],
    ),
    (
        ["learner.num_minibatches=64"],
        "learner.num_minibatches = 64",
        ["use 32, or trainer.num_prompts_per_step=64"],
    ),
    (
        ["learner.max_tokens_per_microbatch=767"],
        "learner.max_tokens_per_microbatch = 767",
        ["data.max_prompt_tokens", "rollout.max_new_tokens", "768"],
    ),
    (
        ["learner.max_tokens_per_forward_pass=767"],
        "learner.max_tokens_per_forward_pass = 767",
        ["data.max_prompt_tokens", "rollout.max_new_tokens", "768"],
    ),
    (
        ["rollout.allow_partial_groups=true"],
        "rollout.allow_partial_groups = true",
        ["rollout.on_failure = stop", "rollout.on_failure=drop"],
    ),
    (
        ["eval.every_steps=11", "trainer.total_steps=10"],
        "eval.every_steps = 11",
        ["trainer.total_steps = 10", "0 to turn it off"],
    ),
    (["trainer.checkpoint_every_steps=101"], "trainer.checkpoint_every_steps = 101", ["trainer.total_steps = 100"]),
    (
        ["eval.every_epochs=3", "trainer.total_epochs=2"],
        "eval.every_epochs = 3",
        ["trainer.total_epochs = 2", "0 to turn it off"],
    ),
    (
        ["trainer.checkpoint_every_epochs=3", "trainer.total_epochs=2"],
        "trainer.checkpoint_every_epochs = 3",
        ["would never save before the end"],
    ),
    ([FILES, "eval.every_epochs=1"], "eval.every_epochs = 1", ["data.eval is empty", "data.train"]),
    (
        [
            "learner.num_warmup_steps=12",
            "trainer.total_steps=3",
            "learner.num_minibatches=2",
            "learner.num_epochs=2",
        ],
        "learner.num_warmup_steps = 12",
        ["the 12 optimiser steps of trainer.total_steps = 3; use less than 12"],
    ),
    (
        [
            "learner.num_warmup_steps=2",
            "trainer.total_steps=3",
            "critic.enabled=true",
            "critic.num_warmup_steps=1",
            "algorithm.advantage=gae",
        ],
        "learner.num_warmup_steps = 2",
        ["the 2 optimiser steps of trainer.total_steps = 3"],
    ),
    (
        ["data.num_filter_workers=4", "data.truncation=left"],
        "data.num_filter_workers = 4",
        ["data.truncation = left", "set it back to 0"],
    ),
    (
        ["data.min_image_pixels=2000", "data.max_image_pixels=1000"],
        "data.min_image_pixels = 2000",
        ["data.max_image_pixels = 1000", "use at most 1000"],
    ),
    (["data.num_train_rows=31"], "data.num_train_rows = 31", ["trainer.num_prompts_per_step = 32"]),
    (["model.dtype=float16", "model.device=cpu"], "model.dtype = 'float16'", ["slower than float32", "model.device"]),
    (["learner.loss_scale=1024"], "learner.loss_scale = 1024", ["nothing reads this", "model.dtype=float16"]),
    (["model.dtype=float16", "learner.loss_scale=1000"], "learner.loss_scale = 1000", ["a power of two"]),
    (
        ["eval.num_samples_per_prompt=2"],
        "eval.num_samples_per_prompt = 2",
        ["eval.temperature = 0", "above 0"],
    ),
    ([FILES, "data.task_args.max_operand=9"], "data.task_args = {max_operand: 9}", ["data.train", "back to {}"]),
    ([FILES, "data.num_train_rows=100"], "data.num_train_rows = 100", ["[rows.parquet]", "back to 2048"]),
    ([FILES, "data.num_eval_rows=100"], "data.num_eval_rows = 100", ["data.train", "back to 256"]),
    (["data.eval=held.jsonl", "data.num_eval_rows=100"], "data.num_eval_rows = 100", ["data.eval = [held.jsonl]"]),
    ([FILES, "eval.every_steps=5"], "eval.every_steps = 5", ["data.eval is empty", "data.train"]),
    (["warm_start.learning_rate=1e-3"], "warm_start.learning_rate = 0.001", ["warm_start.num_steps = 0"]),
    (
        ["learner.lowest_learning_rate_fraction=0.1"],
        "learner.lowest_learning_rate_fraction = 0.1",
        ["learner.schedule = constant never falls; use linear or cosine"],
    ),
    (
        ["learner.warmup_fraction=0.1", "learner.num_warmup_steps=3"],
        "learner.warmup_fraction = 0.1",
        ["learner.num_warmup_steps = 3", "set one of them to 0"],
    ),
    (
        [*CRITIC, "critic.lowest_learning_rate_fraction=0.1"],
        "critic.lowest_learning_rate_fraction = 0.1",
        ["nothing reads this", "set critic.schedule to linear or cosine"],
    ),
    (
        [
            *CRITIC,
            "critic.schedule=linear",
            "critic.lowest_learning_rate_fraction=0.1",
            "learner.lowest_learning_rate_fraction=0.2",
        ],
        "learner.lowest_learning_rate_fraction = 0.2",
        ["learner.schedule = constant never falls"],
    ),
    (
        ["rollout.weight_transfer=file"],
        "rollout.weight_transfer = 'file'",
        ["rollout.placement=disaggregated", "'auto'"],
    ),
    (["rollout.device=cuda:1"], "rollout.device = 'cuda:1'", ["rollout.placement=disaggregated", "'auto'"]),
    (
        [OWN, "learner.offload_during_rollout=true"],
        "learner.offload_during_rollout = true",
        ["rollout.placement=colocated", "set it to false"],
    ),
    (
        ["rollout.backend=vllm", "rollout.servers=[http://127.0.0.1:8000]", "learner.offload_during_rollout=true"],
        "learner.offload_during_rollout = true",
        ["running servers", "set it to false", "without rollout.servers"],
    ),
    (
        ["rollout.max_staleness=2", "learner.offload_during_rollout=true"],
        "learner.offload_during_rollout = true",
        ["rollout.max_staleness = 2", "rollout.max_staleness=0"],
    ),
    (["learner.residency=[auto, kv_cache]"], "learner.residency = [auto, kv_cache]", ["[auto], [resident]"]),
    (
        ["rollout.max_staleness=2", "learner.residency=[kv_cache]"],
        "learner.residency = [kv_cache]",
        ["rollout.max_staleness = 2", "use [auto]"],
    ),
    ([OWN, "learner.residency=[parameters]"], "learner.residency = [parameters]", ["rollout.backend=embedded"]),
    ([OWN, "learner.residency=[optimizer]"], "learner.residency = [optimizer]", ["learner.offload_optimizer=true"]),
    (
        ["learner.residency=[weights]", "lora.rank=4", "rollout.publish=adapter"],
        "learner.residency = [weights]",
        ["rollout.publish=full", "leave weights out"],
    ),
]


def test_a_clash_names_both_keys_and_the_remedy(assert_clashes):
    assert_clashes(CLASHES)


FITTING = [
    ["learner.num_minibatches=8"],
    ["learner.max_tokens_per_microbatch=768"],
    ["learner.max_tokens_per_forward_pass=768"],
    ["eval.every_steps=10", "trainer.checkpoint_every_steps=10", "trainer.total_steps=10"],
    ["learner.num_warmup_steps=9", "trainer.total_steps=10"],
    ["learner.warmup_fraction=0.1", "learner.schedule=cosine"],
    ["eval.every_epochs=2", "trainer.checkpoint_every_epochs=2", "trainer.total_epochs=2"],
    ["trainer.best_metric=eval/reward/mean", "eval.after=false", "eval.every_epochs=1"],
    ["eval.before=false", "eval.after=false", "eval.every_epochs=1", "eval.num_prompts=3"],
    ["cluster=ray", "cluster.max_restarts=1", "trainer.checkpoint_every_minutes=30"],
    [*CRITIC, "critic.schedule=linear", "critic.lowest_learning_rate_fraction=0.1"],
    [*CRITIC, "critic.schedule=linear", "learner.lowest_learning_rate_fraction=0.1"],
    [*CRITIC, "learner.schedule=linear", "critic.lowest_learning_rate_fraction=0.1"],
    ["data.num_train_rows=32"],
    ["data.num_train_rows=16", "data.train=[arithmetic, countdown]"],
    ["eval.num_samples_per_prompt=2", "eval.temperature=0.5"],
    [FILES, "data.num_train_rows=2048", "data.task_args={}"],
    [FILES, "data.eval=arithmetic", "data.task_args.max_operand=9", "data.num_eval_rows=10"],
    [FILES, "trainer.num_prompts_per_step=4096"],
    [FILES, "eval.every_steps=5", "data.eval=held.parquet"],
    ["data.train=[rows.parquet, arithmetic]", "data.num_train_rows=100"],
    ["warm_start.num_steps=5", "warm_start.learning_rate=1e-3"],
    ["eval.before=false", "eval.num_prompts=8"],
    ["learner.schedule=cosine", "learner.lowest_learning_rate_fraction=0.1"],
    [OWN, "rollout.weight_transfer=file", "rollout.device=cuda:1"],
    ["rollout.device=cpu", "model.device=cpu"],
]


def test_settings_that_go_together_load(assert_loads_again):
    assert_loads_again(FITTING)


def test_switching_off_over_a_recipe_that_sets_up_is_fine(write):
    recipe = write("r.yaml", "warm_start: {num_steps: 5, learning_rate: 3e-3}\neval: {num_prompts: 8}\n")
    config = load_config(recipe, ["warm_start.num_steps=0", "eval.before=false", "eval.after=false"]).config
    assert config.warm_start.num_steps == 0
    assert config.eval.num_prompts == 8


def test_the_command_line_may_replace_a_setting_of_the_recipe_by_another_one(write):
    text = "model: {device: cpu}\n"
    text += "rollout: {backend: native, placement: disaggregated, device: cpu}\n"
    recipe = write("r.yaml", text + "algorithm: {policy_loss: sapo, aggregation: seq-mean-token-sum}\n")
    others = ["rollout.placement=colocated", "rollout.servers=[http://127.0.0.1:1]"]
    others.append("algorithm.policy_loss_args={aggregation: token-sum}")
    config = load_config(recipe, others).config
    assert config.rollout.device == "cpu"
    recipe = write("r.yaml", "engine: {memory_fraction: 0.5}\n")
    loaded = load_config(recipe, ["engine.kv_cache_gib=2"])
    assert loaded.config.engine.memory_fraction == 0.5
    of_server = read_engine_config(engine_arguments(loaded.config.engine, shares_device=True))
    assert (of_server.kv_cache_gib, of_server.memory_fraction) == (2, 0), "a server refuses both"
    resolved = write("resolved.yaml", to_yaml(loaded.config))
    assert load_config(resolved).config == loaded.config


def test_asking_for_what_the_recipe_has_off_is_a_problem(write, problems):
    recipe = write("r.yaml", "warm_start: {num_steps: 0}\neval: {before: false, after: false}\n")
    lines = problems(recipe, "warm_start.learning_rate=3e-3", "eval.num_prompts=8")
    assert [line.split(":")[0] for line in lines] == [
        "warm_start.learning_rate = 0.003 (command line)",
        "eval.num_prompts = 8 (command line)",
    ]
    assert "eval.before, eval.after, eval.every_steps, eval.every_epochs, eval.only are all off" in lines[1]


def test_all_clashes_come_together_with_all_wrong_values(problems):
    lines = problems(None, "run.seed=x", "model.dtype=float16", "model.device=cpu", "learner.num_minibatches=5")
    assert sorted(line.split(" ")[0] for line in lines) == ["learner.num_minibatches", "model.dtype", "run.seed"]


def test_no_clash_is_reported_with_a_value_that_was_wrong_itself(problems):
    (line,) = problems(None, "trainer.total_steps=x", "eval.every_steps=500")
    assert line.startswith("trainer.total_steps")
    (line,) = problems(None, "trainer.total_step=1000", "eval.every_steps=500")
    assert line.startswith("trainer.total_step ")


def test_a_clash_of_a_default_says_so(problems):
    (line,) = problems(None, "rollout.max_new_tokens=20000")
    assert line.startswith("learner.max_tokens_per_microbatch = 16384 (default): a whole sequence must fit")


def test_the_resolved_recipe_of_a_run_that_was_cut_short_loads_again(tmp_path):
    config = load_config("quickstart", ["trainer.total_steps=6"]).config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml", []).config == config


def test_a_run_cut_short_on_the_command_line_keeps_the_warm_up_of_its_recipe(write):
    recipe = write("r.yaml", "learner: {num_warmup_steps: 5}\n")
    config = load_config(recipe, ["trainer.total_steps=2"]).config
    assert load_config(write("resolved.yaml", to_yaml(config))).config.learner.num_warmup_steps == 5


def test_a_backend_declares_which_engine_settings_it_reads(tmp_path, problems):
    load_config(None, ["rollout.backend=hf", "engine.max_queue=7", "engine.max_sequences=4"])
    (line,) = problems(None, "rollout.backend=hf", "engine.decode_steps=3")
    assert "the hf backend does not read this" in line
    load_config(None, ["rollout.backend=hf", "rollout.placement=disaggregated"])
    file = tmp_path / "mine.py"
    file.write_text("@BACKENDS.register(BackendTraits(engine_settings=('decode_steps',)))\nclass Mine: ...\n")
    mine = f"rollout.backend={file}:Mine"
    load_config(None, [mine, "engine.decode_steps=3"])
    (line,) = problems(None, mine, "engine.max_queue=7")
    assert "does not read this" in line
    adapters = [mine, "lora.rank=4", "rollout.publish=adapter"]
    (line,) = problems(None, *adapters)
    assert "does not take adapters alone; use embedded, native or vllm" in line
    for traits, settings in (
        ("takes_adapters=True", adapters),
        ("is_planned=True", [mine, "learner.residency=[weights]"]),
    ):
        file.write_text(f"@BACKENDS.register(BackendTraits({traits}))\nclass Mine: ...\n")
        load_config(None, settings)
    file.write_text("@BACKENDS.register(BackendTraits(needs_servers=True))\nclass Mine: ...\n")
    (line,) = problems(None, mine)
    assert f"{file}:Mine talks to servers; name running ones in rollout.servers" in line
    file.write_text("@BACKENDS.register(BackendTraits(engine_settings='decode_steps'))\nclass Mine: ...\n")
    (line,) = problems(None, mine)
    assert "engine_settings = 'decode_steps' must be a tuple of names" in line
