"""What rows and template arguments ask for that nothing reads is said once."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import tiny

from headwater.config.load import load_config
from headwater.config.schema import Config, RewardConfig
from headwater.data.notices import data_notices
from headwater.observe.spans import Spans
from headwater.rewards.managers.naive import NaiveRewardManager

TEMPLATE = "{% if enable_thinking is false %}...{% endif %}{{ messages[0].content }}"


def notices(prompts, workflow: str = "rlvr", reads=lambda name: False, template=TEMPLATE, **template_args) -> list[str]:
    config = Config()
    config = replace(
        config,
        data=replace(config.data, chat_template_args=template_args),
        rollout=replace(config.rollout, workflow=workflow),
    )
    return [str(each) for each in data_notices(prompts, config, template, reads, lambda prompt: True)]


def test_rows_that_ask_for_tools():
    rows = [tiny.prompt(), tiny.prompt(tools_kwargs={"calc": {"create_kwargs": {}}})]
    (said,) = notices(rows)
    assert said.startswith("tools_kwargs of the rows: has no effect (tools: calc), because rollout.workflow = rlvr")
    assert notices(rows, workflow="mine.py:Tools") == []
    schema = {"type": "function", "function": {"name": "calc"}}
    offering = [tiny.prompt(tools_kwargs={"calc": {}}, tool_schemas=(schema,))]
    (said,) = notices(offering, workflow="tool_agent")
    assert said.startswith("the chat template: does not mention tools")
    assert notices(offering, workflow="tool_agent", template="{% for tool in tools %}{% endfor %}") == []
    needy = [tiny.prompt(uid="row9", extra_info={"need_tools_kwargs": True})]
    for workflow in ("rlvr", "mine.py:Tools"):
        (said,) = notices(needy, workflow=workflow)
        assert said.startswith("row row9: has extra_info.need_tools_kwargs but no tools_kwargs")


def test_columns_that_nothing_reads():
    rows = [tiny.prompt(columns={"answer": 1, "ability": "maths", "prompt": "?"}), tiny.prompt(columns={"hint": 1})]
    (said,) = notices(rows)
    assert said.startswith("columns answer, hint: nothing reads them")
    assert notices(rows, reads=lambda name: name == "answer")[0].startswith("columns hint:")
    assert notices(rows, workflow="mine.py:Tools") == []


def test_a_ground_truth_under_another_name_is_suspected():
    """A function would receive None as ground_truth and give every response 0."""
    rows = [tiny.prompt(columns={"answer": "5"}, ground_truth=None)] * 2
    (said,) = notices(rows)
    assert "No row has a ground_truth" in said
    assert said.endswith("data.sources.mine.columns.ground_truth=answer")
    assert notices(rows, reads=lambda name: name == "answer") == []
    (said,) = notices([*rows, tiny.prompt(columns={"answer": "5"}, ground_truth="5")])
    assert "ground_truth" not in said


def test_template_arguments_that_the_template_does_not_read():
    assert notices([tiny.prompt()], enable_thinking=False) == []
    (said,) = notices([tiny.prompt()], enable_thinking=False, enable_thinkin=False)
    assert said.startswith("data.chat_template_args.enable_thinkin: has no effect")
    assert notices([tiny.prompt()], template=None, anything=1) == []  # a tokenizer may render chats in code


def test_reward_settings_that_no_scorer_reads():
    rows = [tiny.prompt(data_source="gsm8k"), tiny.prompt(data_source="math")]
    given = RewardConfig(where="threads", timeout_s=5.0, max_retries=2)

    def said(rows, **settings) -> list[str]:
        reward = replace(given, **settings)
        config, scoring = replace(Config(), reward=reward), NaiveRewardManager(reward, Spans())
        with closing(scoring):
            told = data_notices(rows, config, None, lambda name: True, lambda prompt: True, scoring.unread_settings)
        return [each.subject for each in told]

    assert said(rows[:1]) == ["reward.max_retries = 2", "reward.timeout_s = 5.0", "reward.where = 'threads'"]
    assert said(rows) == [], "the scorer of the second row is not called directly"
    assert said(rows[1:], where="event_loop") == ["reward.timeout_s = 5.0"], "it blocks the event loop"
    assert said(rows, functions={"a": {"function": "exact_match"}, "b": {"function": "math"}}) == []
    assert said(rows, function="exact_match", max_retries=0, where="processes") == ["reward.timeout_s = 5.0"]


def test_settings_of_images_that_a_text_model_does_not_read():
    def said(*overrides: str, takes_media: bool = False) -> list[str]:
        config = load_config(None, ["trainer.num_prompts_per_step=1", *overrides]).config
        told = data_notices(
            [tiny.prompt()], config, None, lambda name: True, lambda prompt: True, takes_media=takes_media
        )
        assert all("has no effect, because model.path = " in each.text for each in told)
        return [each.subject for each in told]

    assert said() == []
    given = ["data.max_image_pixels=1000", "data.video_frames_per_s=3"]
    assert said(*given) == ["data.max_image_pixels = 1000", "data.video_frames_per_s = 3.0"]
    assert said(*given, takes_media=True) == []
    assert said(*given, "data.dataset=mine.py:Rows") == []


def test_periods_in_epochs_that_are_longer_than_the_run():
    def said(total_steps: int, *overrides: str) -> list[str]:
        config = load_config(None, ["trainer.num_prompts_per_step=2", *overrides]).config
        config = replace(config, trainer=replace(config.trainer, total_steps=total_steps))
        rows = [tiny.prompt()] * 4
        return [str(each) for each in data_notices(rows, config, None, lambda name: True, lambda prompt: True)]

    (told,) = said(5, "eval.every_epochs=3")
    assert told == (
        "eval.every_epochs = 3: has no effect, because trainer.total_steps = 5 is 2.5 passes over 4 training prompts; "
        "use eval.every_steps, or more steps"
    )
    assert said(6, "eval.every_epochs=3") == []
    assert said(5, "eval.every_epochs=3", "trainer.total_epochs=3") == [], "the last epoch ends with the run"
    (told,) = said(3, "trainer.checkpoint_every_epochs=2")
    assert told.startswith("trainer.checkpoint_every_epochs = 2: has no effect")
    assert told.endswith("use trainer.checkpoint_every_steps, or more steps")
