"""Settings of algorithms, rewards, the critic and adapters that clash, or that nothing would read."""

from __future__ import annotations

from headwater.config.explain import to_yaml
from headwater.config.load import load_config

ALL_SAMPLES = "learner.skip_zero_advantages=false"
PPO = ["algorithm.advantage=gae", "critic.enabled=true"]

CLASHES = [
    *(
        (
            [f"algorithm.advantage={name}", "rollout.num_samples_per_prompt=1"],
            "rollout.num_samples_per_prompt = 1 (command line)",
            [f"algorithm.advantage = {name} compares", "at least 2"],
        )
        for name in ("grpo", "grpo_passk", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline")
    ),
    (
        [
            "algorithm.advantage=optimal_token_baseline",
            "algorithm.old_logprobs=recompute",
            "rollout.num_samples_per_prompt=1",
        ],
        "rollout.num_samples_per_prompt = 1",
        ["optimal_token_baseline compares"],
    ),
    *(
        (
            [f"algorithm.advantage={name}"],
            f"algorithm.advantage = '{name}'",
            ["critic.enabled=true", "such as grpo"],
        )
        for name in ("gae", "gae_turn")
    ),
    (["critic.enabled=true"], "critic.enabled = true", ["algorithm.advantage = grpo reads no values", "advantage=gae"]),
    (["critic.clip=0.2"], "critic.clip = 0.2", ["critic.enabled = false means no critic; turn it on, or remove"]),
    (
        [*PPO, "critic.num_warmup_steps=10", "trainer.total_steps=10"],
        "critic.num_warmup_steps = 10",
        ["trainer.total_steps = 10; use less than 10"],
    ),
    (["lora.alpha=16"], "lora.alpha = 16", ["lora.rank = 0 trains all weights; set it too"]),
    (
        ["lora.rank=8", "warm_start.num_steps=5", "algorithm.kl_in_reward=0.1"],
        "lora.rank = 8",
        ["the model without adapters", "warm_start.num_steps=0"],
    ),
    (
        ["algorithm.entropy_bonus=0.01"],
        "learner.skip_zero_advantages = true (default)",
        ["algorithm.entropy_bonus has a gradient there; use false"],
    ),
    (
        ["algorithm.kl_in_loss=0.01", "algorithm.entropy_bonus=0.01"],
        "learner.skip_zero_advantages = true",
        ["algorithm.entropy_bonus has a gradient there and algorithm.kl_in_loss has"],
    ),
    *(
        (
            [f"algorithm.policy_loss={name}"],
            "learner.skip_zero_advantages = true",
            [f"algorithm.policy_loss = {name} depends on them; use false"],
        )
        for name in ("dro", "kl_cov", "clip_cov")
    ),
    (["algorithm.kl_target=6"], "algorithm.kl_target = 6.0", ["algorithm.kl_in_reward = 0 turns the penalty off"]),
    (
        ["algorithm.kl_in_reward=0.1", "algorithm.kl_horizon=100"],
        "algorithm.kl_horizon = 100",
        ["algorithm.kl_target = 0 steers nothing"],
    ),
    (
        ["algorithm.kl_in_reward=0.1", "algorithm.kl_target=6", "algorithm.kl_horizon=255"],
        "algorithm.kl_horizon = 255",
        ["a step has 256 samples", "use at least 256"],
    ),
    (
        ["algorithm.kl_estimator=k1"],
        "algorithm.kl_estimator = 'k1'",
        ["algorithm.kl_in_reward and algorithm.kl_in_loss are both 0; set one"],
    ),
    (
        ["algorithm.kl_in_reward=0.1", "algorithm.kl_estimator=k3+"],
        "algorithm.kl_estimator = 'k3+'",
        ["a penalty in the reward has none; use k3, or algorithm.kl_in_loss"],
    ),
    (
        ["algorithm.corrections=[truncate]"],
        "algorithm.corrections = [truncate]",
        ["algorithm.old_logprobs = rollout", "policy_loss = ppo already contains its ratio", "policy_loss=reinforce"],
    ),
    (
        ["algorithm.corrections=[reject]", "algorithm.old_logprobs=loglinear"],
        "algorithm.corrections = [reject]",
        ["algorithm.old_logprobs = loglinear", "use algorithm.old_logprobs=recompute, rollout, or []"],
    ),
    (
        ["algorithm.corrections=[reject, reject]", "algorithm.corrections_args.reject=[{upper: 2.0}]"],
        "algorithm.corrections_args.reject = [{upper: 2.0}]",
        ["has 1 entries, and algorithm.corrections names reject 2 times; give one for each"],
    ),
    (
        ["algorithm.corrections=[reject, reject]", "algorithm.corrections_args.reject=[{upper: 2.0}, {upper: 2.0}]"],
        "algorithm.corrections_args.reject = [{upper: 2.0}, {upper: 2.0}]",
        ["has two equal entries; once is enough"],
    ),
    (
        ["algorithm.corrections=[reject, reject]", "algorithm.corrections_args.reject=[{upper: 2.0}, {upper: -1}]"],
        "algorithm.corrections_args.reject[1].upper = -1",
        ["must be >= 0"],
    ),
    (
        ["critic.bootstrap_unfinished=true"],
        "critic.bootstrap_unfinished = true",
        ["critic.enabled = false means no critic"],
    ),
    (
        ["algorithm.kl_clamp=none"],
        "algorithm.kl_clamp = 'none'",
        ["algorithm.kl_in_reward and algorithm.kl_in_loss are both 0"],
    ),
    *(
        (
            ["algorithm.old_logprobs=recompute", f"algorithm.corrections=[{names}]", *more],
            f"algorithm.corrections = [{names}]",
            [reason],
        )
        for names, more, reason in (
            (
                "truncate, icepop",
                (),
                "truncate and icepop each weigh by the ratio, which would square it; use one",
            ),
            (
                "truncate, reject",
                ("algorithm.corrections_args.reject.weighted=true",),
                "truncate and reject each weigh by the ratio",
            ),
            ("m2po, m2po", (), "names m2po 2 times; give algorithm.corrections_args.m2po as a list"),
        )
    ),
    (
        ["algorithm.corrections=[m2po]", "algorithm.policy_loss=decoupled", "algorithm.old_logprobs=recompute"],
        "algorithm.corrections = [m2po]",
        ["algorithm.policy_loss = decoupled already weighs by the same ratio"],
    ),
    (
        ["algorithm.policy_loss=decoupled"],
        "algorithm.policy_loss = 'decoupled'",
        ["algorithm.old_logprobs = rollout", "recompute or loglinear, or policy_loss=ppo"],
    ),
    (
        ["algorithm.advantage=optimal_token_baseline"],
        "algorithm.advantage = 'optimal_token_baseline'",
        ["use algorithm.old_logprobs=recompute"],
    ),
    (["rollout.top_k=5"], "rollout.top_k = 5", ["use 0, or algorithm.old_logprobs=recompute"]),
    (
        ["rollout.top_p=0.9", "algorithm.old_logprobs=loglinear"],
        "rollout.top_p = 0.9",
        ["use 1.0, or algorithm.old_logprobs=recompute"],
    ),
    *(
        (
            [f"algorithm.policy_loss={name}", "algorithm.aggregation=token-sum"],
            "algorithm.aggregation = 'token-sum'",
            [f"algorithm.policy_loss = {name} always uses seq-mean-token-mean"],
        )
        for name in ("geo_mean", "sapo")
    ),
    (
        ["algorithm.filter_groups=true", "rollout.num_samples_per_prompt=1", "algorithm.advantage=remax"],
        "algorithm.filter_groups = true",
        ["every group would be dropped", "rollout.num_samples_per_prompt=2"],
    ),
    (
        ["algorithm.filter_groups=true", "reward.model=./judge"],
        "algorithm.filter_groups = true",
        ["before reward.model scores them"],
    ),
    (
        ["algorithm.max_filter_rounds=3"],
        "algorithm.max_filter_rounds = 3",
        ["algorithm.filter_groups = false draws no new prompts"],
    ),
    (
        ["algorithm.advantage=remax", "reward.model=./judge"],
        "algorithm.advantage = 'remax'",
        ["reward.model does not score the greedy response"],
    ),
    (
        ["algorithm.advantage=remax", "reward.overlong_tokens=64"],
        "algorithm.advantage = 'remax'",
        ["reward.overlong_tokens does not count the tokens of the greedy response", "such as rloo"],
    ),
    (
        ["algorithm.advantage=remax", "reward.scale=2"],
        "algorithm.advantage = 'remax'",
        ["reward.scale does not change the score of the greedy response"],
    ),
    (
        ["algorithm.advantage=gdpo", "reward.clip=2"],
        "algorithm.advantage = 'gdpo'",
        ["reward.clip is in none of them"],
    ),
    (
        ["algorithm.advantage=gpg", "reward.bias=0.5"],
        "algorithm.advantage = 'gpg'",
        ["with reward.bias none is", "such as grpo"],
    ),
    (
        ["algorithm.advantage=gdpo", "algorithm.kl_in_reward=0.1"],
        "algorithm.advantage = 'gdpo'",
        ["algorithm.kl_in_reward is in none of them", "or algorithm.kl_in_loss"],
    ),
    (
        ["algorithm.advantage=gdpo", "reward.model=./judge"],
        "algorithm.advantage = 'gdpo'",
        ["reward.model is in none of them"],
    ),
    (
        ["algorithm.advantage=gdpo", "algorithm.filter_groups=true"],
        "algorithm.filter_groups = true",
        ["algorithm.advantage = gdpo can learn", "use false"],
    ),
    (
        ["algorithm.advantage=gpg", "reward.overlong_tokens=64"],
        "algorithm.advantage = 'gpg'",
        ["with reward.overlong_tokens none is", "such as grpo"],
    ),
    (["reward.model_weight=0.5"], "reward.model_weight = 0.5", ["reward.model is empty; name one, or remove this"]),
    (
        ["reward.overlong_penalty=0.5"],
        "reward.overlong_penalty = 0.5",
        ["reward.overlong_tokens = 0 means no penalty; set it too"],
    ),
    (
        ["reward.overlong_tokens=257"],
        "reward.overlong_tokens = 257",
        ["rollout.max_new_tokens = 256; use at most 256"],
    ),
]


def test_a_clash_names_both_keys_and_the_remedy(assert_clashes):
    assert_clashes(CLASHES)


def test_arguments_for_which_an_algorithm_has_no_meaning_are_refused(problems):
    for setting, name, argument, value, message in (
        ("policy_loss", "sapo", "tau_positive", 0, "must be > 0"),
        ("policy_loss", "ppo", "dual_clip", 1, "must be > 1"),
        ("policy_loss", "ppo", "clip_low", -0.1, "must be >= 0"),
        ("policy_loss", "gspo", "clip_high", -1, "must be >= 0"),
        ("policy_loss", "dro", "beta", 0, "must be > 0"),
        ("advantage", "grpo", "epsilon", 0, "must be > 0"),
    ):
        key = f"algorithm.{setting}_args"
        lines = problems(None, f"algorithm.{setting}={name}", f"{key}={{{argument}: {value}}}", ALL_SAMPLES)
        assert any(f"{key}.{argument} = {value}" in line and message in line for line in lines), lines
    bounds = ["algorithm.corrections=[truncate]", "algorithm.corrections_args={truncate: {upper: 0.5, lower: 0.9}}"]
    lines = problems(None, *bounds, "algorithm.old_logprobs=recompute")
    assert any("upper = 0.5" in line and "must be >= lower = 0.9" in line for line in lines), lines


FITTING = [
    [*PPO, "critic.clip=0.2", "critic.num_warmup_steps=99", "rollout.num_samples_per_prompt=1"],
    ["critic.enabled=true", "algorithm.advantage=my.module:advantage", "rollout.num_samples_per_prompt=1"],
    ["algorithm.advantage=remax", "rollout.num_samples_per_prompt=1"],
    ["algorithm.advantage=reinforce_plus_plus", "rollout.num_samples_per_prompt=1"],
    ["lora.rank=8", "lora.alpha=16", "algorithm.kl_in_reward=0.1"],
    ["lora.rank=8", "warm_start.num_steps=5"],
    ["lora.rank=8", *PPO],
    ["algorithm.entropy_bonus=0.01", ALL_SAMPLES],
    ["algorithm.kl_in_loss=0.01", "algorithm.kl_estimator=k3+", ALL_SAMPLES],
    ["algorithm.policy_loss=kl_cov", ALL_SAMPLES],
    ["algorithm.kl_in_reward=0.1", "algorithm.kl_estimator=k1", "algorithm.kl_target=6", "algorithm.kl_horizon=256"],
    ["algorithm.corrections=[truncate, reject]", "algorithm.old_logprobs=recompute"],
    ["algorithm.corrections=[m2po]", "algorithm.old_logprobs=metrics"],
    ["algorithm.corrections=[reject, reject]", "algorithm.corrections_args.reject=[{}, {level: sequence}]"],
    ["algorithm.corrections=[truncate, reject]", "algorithm.policy_loss=reinforce"],
    ["algorithm.policy_loss=decoupled", "algorithm.old_logprobs=recompute"],
    ["algorithm.policy_loss=decoupled", "algorithm.old_logprobs=loglinear"],
    ["algorithm.advantage=optimal_token_baseline", "algorithm.old_logprobs=metrics"],
    ["rollout.top_k=5", "rollout.top_p=0.9", "algorithm.old_logprobs=recompute"],
    ["rollout.top_k=5", "algorithm.old_logprobs=metrics"],
    ["algorithm.policy_loss=sapo", "algorithm.policy_loss_args.aggregation=null", "algorithm.aggregation=token-sum"],
    ["algorithm.policy_loss=geo_mean", "algorithm.aggregation=seq-mean-token-mean"],
    ["algorithm.filter_groups=true", "algorithm.max_filter_rounds=3"],
    ["reward.model=./judge", "reward.model_weight=0.5"],
    ["reward.overlong_tokens=256", "reward.overlong_penalty=0.5"],
    ["algorithm.advantage=gdpo", "algorithm.kl_in_loss=0.1", ALL_SAMPLES],
    ["algorithm.advantage=gpg", "algorithm.policy_loss=gpg", "algorithm.filter_groups=true"],
]


def test_settings_that_go_together_load_and_load_again_when_resolved(assert_loads_again):
    assert_loads_again(FITTING)


SET_UP = """
algorithm: {advantage: gae, kl_in_reward: 0.1, kl_target: 6, kl_horizon: 256, kl_estimator: k1, filter_groups: true,
            max_filter_rounds: 3}
critic: {enabled: true, num_warmup_steps: 5}
lora: {rank: 8, alpha: 16}
reward: {overlong_tokens: 4, overlong_penalty: 0.5}
learner: {schedule: linear, lowest_learning_rate_fraction: 0.1}
"""
SWITCHED_OFF = [
    "algorithm.advantage=grpo", "critic.enabled=false", "lora.rank=0", "reward.overlong_tokens=0",
    "algorithm.kl_in_reward=0", "algorithm.kl_target=0", "algorithm.kl_in_loss=0", "algorithm.filter_groups=false",
    "learner.schedule=constant",
]  # fmt: skip


def test_parts_of_a_recipe_can_be_switched_off_and_the_run_resumed(write):
    recipe = write("r.yaml", SET_UP)
    load_config(recipe)
    config = load_config(recipe, SWITCHED_OFF).config
    assert not config.critic.enabled
    assert load_config(write("resolved.yaml", to_yaml(config)), ["trainer.total_steps=200"]).config.lora.alpha == 16


def test_asking_for_a_part_that_the_recipe_has_off_is_a_problem(write, problems):
    resolved = write("resolved.yaml", to_yaml(load_config(None).config))
    asked = ["critic.clip=0.2", "lora.alpha=16", "algorithm.kl_target=6", "reward.model_weight=2"]
    assert [line.split(" ")[0] for line in problems(resolved, *asked)] == [each.split("=")[0] for each in asked]


def test_an_advantage_of_ones_own_may_have_groups_of_one():
    load_config(None, ["algorithm.advantage=my.module:baseline", "rollout.num_samples_per_prompt=1"])
