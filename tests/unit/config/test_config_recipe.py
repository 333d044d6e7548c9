"""Reading recipe files: extending, merging, origins, and what is not a recipe."""

from __future__ import annotations

from pathlib import Path

from headwater.config.load import load_config


def test_no_recipe_is_all_defaults():
    loaded = load_config(None)
    assert loaded.config.run.name == "run"
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.given == frozenset()


def test_an_empty_recipe_is_refused(write, problems):
    for text in ("", "# nothing but a comment\n", "---\n", "null\n"):
        assert problems(write("empty.yaml", text)) == [
            "empty.yaml: is empty; write settings into it, or name another recipe"
        ]


def test_an_empty_section_is_all_defaults(write):
    for text in ("rollout:\n", "{}\n"):
        assert load_config(write("empty.yaml", text)).config == load_config(None).config


def test_origins_name_file_and_line(write):
    write("recipes/base.yaml", "run:\n  name: base\n\nlearner:\n  learning_rate: 1e-5\n  weight_decay: 0.1\n")
    child = write("recipes/child.yaml", "# first\nextends: base.yaml\nlearner:\n  weight_decay: 0.2\n")
    loaded = load_config(child, ["run.seed=3"])
    assert loaded.origins["run.name"] == "recipes/base.yaml:2"
    assert loaded.origins["learner.learning_rate"] == "recipes/base.yaml:5"
    assert loaded.origins["learner.weight_decay"] == "recipes/child.yaml:4"
    assert loaded.origins["run.seed"] == "command line"
    assert loaded.origins["run.root"] == "default"
    assert {"run.name", "run.seed"} <= loaded.given
    assert "run.root" not in loaded.given


def test_line_of_a_block_list_is_the_line_of_its_key(write):
    recipe = write("r.yaml", "data:\n  train:\n    - a.parquet\n    - b.parquet\n")
    loaded = load_config(recipe)
    assert loaded.config.data.train == ("a.parquet", "b.parquet")
    assert loaded.origins["data.train"] == "r.yaml:2"


def test_a_file_outside_the_working_directory_keeps_its_whole_path(write, monkeypatch, tmp_path):
    recipe = write("r.yaml", "run: {name: x}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(recipe).origins["run.name"] == f"{recipe}:1"


def test_extends_chain_and_list_let_the_later_win(write):
    write("a.yaml", "run: {name: a, seed: 1}\ntrainer: {total_steps: 10}\n")
    write("b.yaml", "extends: a.yaml\nrun: {name: b}\n")
    write("c.yaml", "run: {name: c, root: other}\n")
    child = write("deep/child.yaml", "extends: [../b.yaml, ../c.yaml]\ntrainer: {num_prompts_per_step: 4}\n")
    config = load_config(child).config
    assert config.run.name == "c"
    assert config.run.root == "other"
    assert config.run.seed == 1
    assert config.trainer.total_steps == 10
    assert config.trainer.num_prompts_per_step == 4


def test_free_form_mappings_merge_by_key_and_null_replaces(write):
    write("base.yaml", "data:\n  task_args:\n    low: 1\n    high: {soft: 5, hard: 9}\n    signs: [plus]\n")
    child = write(
        "child.yaml", "extends: base.yaml\ndata:\n  task_args:\n    low: null\n    high: {soft: 6}\n    new: x\n"
    )
    loaded = load_config(child, ["data.task_args.signs=[minus]"])
    assert loaded.config.data.task_args == {
        "low": None,
        "high": {"soft": 6, "hard": 9},
        "signs": ["minus"],
        "new": "x",
    }
    assert loaded.origins["data.task_args.low"] == "child.yaml:4"
    assert loaded.origins["data.task_args.high"] == "base.yaml:4, child.yaml:5"
    assert loaded.origins["data.task_args.signs"] == "command line"
    assert loaded.origins["data.task_args"] == "base.yaml:4, child.yaml:4, child.yaml:5, child.yaml:6, command line"


def test_an_empty_mapping_drops_inherited_free_form_arguments_but_no_section(write):
    write("base.yaml", "data: {task_args: {max_operand: 9}, shuffle: false}\n")
    child = write("child.yaml", "extends: base.yaml\ndata: {task_args: {}}\nrun: {}\n")
    config = load_config(child).config
    assert config.data.task_args == {}
    assert config.data.shuffle is False
    empty_section = write("section.yaml", "extends: base.yaml\ndata: {}\n")
    assert load_config(empty_section).config.data.task_args == {"max_operand": 9}
    assert load_config(child, ["data.task_args={}", "data.task_args.low=2"]).config.data.task_args == {"low": 2}


def test_a_cycle_names_the_chain(write, problems):
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "extends: c.yaml\n")
    write("c.yaml", "extends: b.yaml\n")
    (line,) = problems(Path("a.yaml"))
    assert line.startswith("b.yaml extends c.yaml extends b.yaml: a recipe cannot extend itself")


def test_one_base_reached_twice_is_no_cycle(write):
    write("base.yaml", "run: {name: base}\n")
    write("left.yaml", "extends: base.yaml\nrun: {seed: 1}\n")
    write("right.yaml", "extends: base.yaml\n")
    assert load_config(write("top.yaml", "extends: [left.yaml, right.yaml]\n")).config.run.seed == 1


def test_a_missing_base_names_both_files(write, problems):
    write("quickstart.yaml", "")
    (line,) = problems(write("child.yaml", "extends: quikstart.yaml\n"))
    assert line == "quikstart.yaml (extended by child.yaml): no such recipe; did you mean quickstart.yaml?"


def test_a_missing_recipe_and_a_folder_are_named(write, problems, tmp_path):
    write("r.yaml", "")
    (line,) = problems(tmp_path / "nothing.yaml")
    assert line.startswith("nothing.yaml: no such recipe; give the path of a YAML file or the name of a built-in")
    (tmp_path / "folder").mkdir()
    (line,) = problems(tmp_path / "folder")
    assert line.startswith("folder: cannot be read: ")


def test_extends_must_be_paths(write, problems):
    for value in ("3", "[a.yaml, 3]", "{a: b}", "", "[]"):
        write("a.yaml", "")
        (line,) = problems(write("r.yaml", f"run: {{name: x}}\nextends: {value}\n"))
        assert line == "r.yaml:2: extends: must be the path or name of a recipe, or a list of them"


def test_duplicate_keys_name_both_lines(write, problems):
    lines = problems(write("r.yaml", "run:\n  seed: 1\n  name: x\n  seed: 2\nrun:\n  name: y\n"))
    assert lines == [
        "r.yaml:4: 'seed' is given twice; the first is in line 2; remove one",
        "r.yaml:5: 'run' is given twice; the first is in line 1; remove one",
    ]


def test_duplicate_keys_inside_free_form_values_are_found(write, problems):
    (line,) = problems(write("r.yaml", "data:\n  task_args:\n    items:\n      - {a: 1, a: 2}\n"))
    assert line.startswith("r.yaml:4: 'a' is given twice")


def test_a_syntax_error_gives_line_column_and_reason(write, problems):
    (line,) = problems(write("r.yaml", "run:\n  name: x\n  seed: [1, 2\n"))
    assert line.startswith("r.yaml:4:1: not valid YAML: expected ',' or ']'")
    (line,) = problems(write("tab.yaml", "run:\n\tname: x\n"))
    assert line.startswith("tab.yaml:2:1: not valid YAML: found character '\\t'")


def test_the_root_must_be_a_mapping(write, problems):
    for text in ("- run\n", "just text\n", "3\n"):
        (line,) = problems(write("r.yaml", text))
        assert line.startswith("r.yaml:1: a recipe must be a mapping of sections")


NOT_IN_RECIPES = [
    ("run: !!python/name:os.system {}\n", "r.yaml:1: 'tag:yaml.org,2002:python/name:os.system' is not a kind of"),
    ("run: {name: !env HOME}\n", "r.yaml:1: '!env' is not a kind of value that recipes have; remove the tag"),
    ("run: {1: x}\n", "r.yaml:1: key 1: must be text; put it in quotes"),
    ("base: &b {name: x}\nrun:\n  <<: *b\n", "r.yaml:3: merge keys (<<) are not part of recipes"),
    ("data:\n  task_args: &a\n    again: *a\n", "r.yaml:2: this value contains itself"),
    ("run: {name: x}\n---\nrun: {name: y}\n", "r.yaml:2:1: not valid YAML: but found another document"),
]


def test_yaml_that_recipes_do_not_have(write, problems):
    for text, expected in NOT_IN_RECIPES:
        assert any(line.startswith(expected) for line in problems(write("r.yaml", text))), text


def test_a_file_that_is_not_text(write, problems):
    path = write("r.yaml", "")
    path.write_bytes(b"run: \xff\xfe\n")
    (line,) = problems(path)
    assert line == "r.yaml: cannot be read: it is not UTF-8 text"


def test_a_broken_base_does_not_hide_the_other_problems(write, problems):
    write("base.yaml", "run: [\n")
    lines = problems(write("r.yaml", "extends: base.yaml\nrun: {seed: -1}\n"), "nonsense", "trainer.total_steps=0")
    assert [line.split(":")[0].split(" (")[0] for line in lines] == [
        "base.yaml",
        "'nonsense'",
        "run.seed = -1",
        "trainer.total_steps = 0",
    ]
