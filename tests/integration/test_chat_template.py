"""Models without a chat template: plain prompts, and ``model.chat_template``."""

from __future__ import annotations

import json

import pytest
from command import metrics

from headwater.cli.main import main
from headwater.core.errors import ModelError
from headwater.models.load import load_model, load_tokenizer, save_model

RECIPE = """
run: {name: mine}
model: {path: ./base}
data: {train: plain.jsonl, max_prompt_tokens: 64}
reward: {function: "reward.py:compute_score"}
rollout: {max_new_tokens: 4, num_samples_per_prompt: 2}
trainer: {total_steps: 1, num_prompts_per_step: 2, num_threads: 1}
"""
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 3\n"
QUESTIONS = ("2+3=", "4+4=")
OWN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a base model, rows of plain text, and rows of messages."""
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer("tiny:qwen3")
    tokenizer.chat_template = None
    save_model(load_model("tiny:qwen3", dtype="float32", device="cpu", seed=0), tokenizer, tmp_path / "base")
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    for name, prompts in (("plain", QUESTIONS), ("chats", chats)):
        rows = [json.dumps({"prompt": prompt, "ground_truth": "5"}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "own.jinja").write_text(OWN)
    return tmp_path


def test_a_model_without_a_template(folder, capsys):
    assert main(["train", "mine.yaml"]) == 0, capsys.readouterr().err
    assert "The model has no chat template: prompts are used as plain text" in capsys.readouterr().out
    run = folder / "runs" / "mine"
    assert len(metrics(run, "train")) == 1
    assert load_tokenizer(str(run / "checkpoints" / "step_000001" / "model")).chat_template is None

    chats = ["train", "mine.yaml", "data.train=chats.jsonl", "run.name=chats"]
    assert main(chats) == 2
    message = capsys.readouterr().err
    assert "chats.jsonl, line 1: prompt is a list of messages, and the model has no chat template" in message
    assert "set model.chat_template to chatml, plain or a Jinja file" in message
    assert not (folder / "runs" / "chats").exists()

    assert main([*chats, "model.chat_template=own.jinja"]) == 0, capsys.readouterr().err
    assert "plain text" not in capsys.readouterr().out
    run = folder / "runs" / "chats"
    assert load_tokenizer(str(run / "checkpoints" / "step_000001" / "model")).chat_template == OWN
    assert f"chat_template: {folder}/own.jinja" in (run / "config.yaml").read_text()


def test_built_in_templates_and_those_that_do_not_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3="}]
    answered = [*chat, {"role": "assistant", "content": "5"}]

    def render(name: str, messages: list[dict], **options: bool) -> str:
        tokenizer = load_tokenizer("tiny:qwen3", chat_template=name)
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    system, user = "<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\n2+3=<|im_end|>\n"
    assert render("chatml", chat, add_generation_prompt=True) == f"{system}{user}<|im_start|>assistant\n"
    assert render("chatml", answered) == f"{system}{user}<|im_start|>assistant\n5<|im_end|>\n"
    assert render("plain", chat, add_generation_prompt=True) == "Be brief.\n2+3=\n"
    assert render("plain", answered) == "Be brief.\n2+3=\n5\n"
    (tmp_path / "broken.jinja").write_text("{% for message in messages %}")
    (tmp_path / "empty.jinja").write_text("\n")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff\xfe")
    cases = {
        "chatlm": "neither a built-in template nor a file .*; did you mean 'chatml'",
        "no/such.jinja": "neither a built-in template nor a file",
        "broken.jinja": "cannot render a chat .*TemplateSyntaxError",
        "empty.jinja": "the file is empty",
        "bytes.jinja": "cannot be read",
    }
    for name, message in cases.items():
        with pytest.raises(ModelError, match=rf"model.chat_template = {name}: {message}"):
            load_tokenizer("tiny:qwen3", chat_template=name)
