"""Settings on the command line."""

from __future__ import annotations

from headwater.config.load import load_config


def value(*overrides: str):
    return load_config(None, overrides).config


def test_values_are_yaml():
    config = value("data.train=[a.parquet,b.parquet]", "learner.learning_rate=1e-6", "data.shuffle=false")
    assert config.data.train == ("a.parquet", "b.parquet")
    assert config.learner.learning_rate == 1e-6
    assert config.data.shuffle is False


def test_the_last_override_and_the_command_line_win(write):
    recipe = write("r.yaml", "run: {seed: 1}\n")
    assert load_config(recipe, ["run.seed=2", "run.seed=3"]).config.run.seed == 3


def test_one_item_becomes_a_list_of_one():
    assert value("data.train=countdown").data.train == ("countdown",)


def test_free_form_keys_can_be_reached_at_any_depth():
    config = value("data.task_args.max_operand=9", "data.task_args.nested.deep=x", "data.chat_template_args={a: [1]}")
    assert config.data.task_args == {"max_operand": 9, "nested": {"deep": "x"}}
    assert config.data.chat_template_args == {"a": [1]}


def test_a_whole_section_can_be_given():
    assert value("run={name: x, seed: 4}").run.seed == 4


TEXTS = [
    ("", ""),
    ("no", "no"),
    ("2024-01-01", "2024-01-01"),
    ("a=b", "a=b"),
    ("tiny:qwen3", "tiny:qwen3"),
    ("one # two", "one # two"),
    ("one\ntwo", "one\ntwo"),
    ("'quoted'", "quoted"),
    ('"3"', "3"),
    ("Ünï 漢字", "Ünï 漢字"),
]


def test_text_stays_as_it_was_written():
    for text, expected in TEXTS:
        assert value(f"data.system_prompt={text}").data.system_prompt == expected, text


MALFORMED = [
    ("run.seed", "'run.seed' (command line): an override needs a value; write it as section.key=value"),
    ("recipe.yaml", "'recipe.yaml' (command line): an override needs a value; write it as section.key=value"),
    ("=3", "'=3' (command line): '' is not a dotted key; write it as section.key=value"),
    ("run..seed=3", "'run..seed=3' (command line): 'run..seed' is not a dotted key"),
    ("--run.seed=3", "'--run.seed=3' (command line): an override has no dashes in front; write run.seed=3"),
    ("extends=a.yaml", "'extends=a.yaml' (command line): extends belongs in a recipe"),
    ("data.train=[a", "data.train = '[a' (command line): not valid YAML: expected ',' or ']'"),
    ("data.task_args={a: 1, a: 2}", "data.task_args = '{a: 1, a: 2}' (command line): 'a' is given twice"),
    ("data.train.x=1", "data.train = {x: 1} (command line): must be a list"),
]


def test_a_malformed_override_says_how_to_write_it(problems):
    for override, expected in MALFORMED:
        (line,) = problems(None, override)
        assert line.startswith(expected), override


def test_text_that_yaml_takes_for_something_else_says_quote_it(problems):
    (line,) = problems(None, "data.system_prompt=Answer: yes")
    assert line == "data.system_prompt = {Answer: 'yes'} (command line): must be text; put all of it in quotes"
    (line,) = problems(None, "data.system_prompt=[INST] hello")
    assert "not valid YAML" in line
    assert "put it in quotes twice" in line
