"""One run with every stage: epochs, a critic with its own steps, another reference, evaluation over samples, the best
checkpoint, a copy elsewhere; and what is exported from it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from command import CUT_DOWN, PROCESS_LIMIT_S, headwater, metrics, python_of, same_weights, train_here, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwater.cli.export import adapter_base, model_card
from headwater.config.load import load_config
from headwater.core.errors import RunError
from headwater.engine.kv_cache import KVCache
from headwater.learner.learner import LocalLearner
from headwater.learner.snapshot import Snapshot
from headwater.models.builtin.smollm2 import smollm2_folder
from headwater.models.load import load_model, load_tokenizer, save_model
from headwater.observe.manifest import damage
from headwater.observe.run_directory import RunDirectory
from headwater.trainer.mirror import Mirror, local_run

NO_EVAL = ["eval.before=false", "eval.after=false"]
EVERYTHING = [
    "quickstart", "ppo", *[each for each in CUT_DOWN if "total_steps" not in each and "eval." not in each],
    "data.num_train_rows=8", "trainer.total_epochs=2", "critic.num_warmup_steps=1", "critic.num_epochs=2",
    "critic.num_minibatches=2", "critic.adam_beta2=0.9", "reference.path=tiny:llama", "algorithm.kl_in_loss=0.1",
    "learner.skip_zero_advantages=false",
    "eval.num_prompts=0", "eval.batch_size=4", "eval.every_steps=1", "eval.num_samples_per_prompt=2",
    "eval.temperature=1.0", "eval.top_p=0.9", "eval.max_new_tokens=3", "trainer.best_metric=eval/reward/best@2",
    "trainer.keep_checkpoints=1", "trainer.checkpoint_every_steps=1", "trainer.save_learner_logprobs=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("fit")
    train_here(*EVERYTHING, f"run.root={root}", "run.name=all", f"trainer.checkpoint_dir=file://{root}/copy")
    return root / "all"


def test_every_stage_leaves_its_records(run):
    trained, evaluated = metrics(run, "train"), metrics(run, "eval")
    assert [each["step"] for each in trained] == [1, 2, 3, 4], "two epochs of 8 prompts, 4 in each step"
    assert trained[-1]["critic/optimizer_steps"] == 4
    assert trained[-1]["actor/optimizer_steps"] == 1
    assert trained[0]["kl/reference"] > 0.01, "the reference is another model"
    assert [each["step"] for each in evaluated] == [0, 1, 2, 3, 4]
    assert {each["num_prompts"] for each in evaluated} == {10}
    assert {"reward/mean@2", "reward/best@2", "reward/std@2", "reward/largest_digit/best@2"} <= evaluated[0].keys()
    rows = pq.read_table(run / "rollouts" / "step_000002.parquet").to_pylist()
    columns = ("advantages", "returns", "values", "reference_logprobs", "learner_logprobs")
    for row in rows:
        assert all(len(row[name]) == len(row["tokens"]) for name in columns)
        start, mask = row["prompt_length"], row["loss_mask"]
        assert row["advantages"][:start] == [0.0] * start
        for mine, learners, is_trained in zip(row["logprobs"], row["learner_logprobs"], mask, strict=True):
            assert not is_trained or mine == pytest.approx(learners, abs=1e-3)
    parts = sorted(path.name for path in (run / "eval").glob("step_000004*"))
    assert parts == ["step_000004.parquet", "step_000004_part_002.parquet", "step_000004_part_003.parquet"]
    validation = pq.read_table(run / "eval" / parts[0]).to_pylist()
    assert all(len(row["learner_logprobs"]) == len(row["tokens"]) for row in validation)
    assert max(len(row["tokens"]) - row["prompt_length"] for row in validation) == 3


def best_step(run: Path) -> int:
    values = {each["step"]: each["reward/best@2"] for each in metrics(run, "eval") if each["step"] > 0}
    return max(values, key=lambda step: (values[step], -step))


def test_the_best_and_the_newest_checkpoint_are_kept_and_copied(run, tmp_path):
    kept = sorted({best_step(run), 4})
    assert RunDirectory(run).checkpoint_steps() == kept
    place = f"file://{run.parent}/copy/all"
    fetched = RunDirectory(local_run(place, tmp_path))
    assert fetched.path == tmp_path / "all"
    assert fetched.checkpoint_steps() == [4]
    assert damage(fetched.checkpoint(4)) == ()
    assert fetched.read_metrics() == RunDirectory(run).read_metrics()


@pytest.mark.slow
def test_a_run_is_resumed_from_its_copy(run, tmp_path):
    again = tmp_path / "all"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints")
    train_here(
        "--resume", again, "trainer.total_epochs=3", "trainer.best_metric=", "eval.after=false", "eval.every_steps=0"
    )
    assert [each["step"] for each in metrics(again, "train")] == [1, 2, 3, 4, 5, 6]


def test_a_copy_in_any_storage_is_complete_or_not_there(run, tmp_path):
    import fsspec

    mirror = Mirror("memory://bucket/all", RunDirectory(run))
    checkpoint = RunDirectory(run).checkpoint(4)
    mirror.update([checkpoint])
    assert mirror.complete() == ["step_000004"]
    fetched = RunDirectory(local_run("memory://bucket/all", tmp_path))
    assert damage(fetched.checkpoint(4)) == ()
    files = fsspec.filesystem("memory")
    files.rm_file("/bucket/all/checkpoints/step_000004/manifest.json")
    assert mirror.complete() == [], "an upload that was broken off does not count"
    mirror.update([checkpoint])
    assert mirror.complete() == ["step_000004"]
    mirror.update([])
    assert not files.exists("/bucket/all/checkpoints/step_000004")
    with pytest.raises(RunError, match=r"trainer\.checkpoint_dir = nosuch://a/b: cannot use nosuch://a/b \(ValueError"):
        Mirror("nosuch://a/b", RunDirectory(run))


def test_an_exported_model_is_loaded_by_transformers(run, tmp_path):
    result = headwater("export", run, "--step", "best", "--to", tmp_path / "best", "--dtype", "bfloat16")
    assert result.code == 0, result.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert model.dtype == torch.bfloat16
    trained = weights(run, best_step(run))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name].bfloat16()), name
    assert AutoTokenizer.from_pretrained(tmp_path / "best").encode("1+2")
    card = (tmp_path / "best" / "README.md").read_text()
    assert card.startswith('---\nbase_model: "tiny:qwen3"\n')
    for part in (
        'license: "other"',
        'pipeline_tag: "text-generation"',
        f"step {best_step(run)} of 4",
        "| reward/mean |",
        "best_metric: eval/reward/best@2",
    ):
        assert part in card, part
    assert str(run) not in card
    config = load_config(run / "config.yaml", ["model.path=smollm2"]).config
    card = model_card(RunDirectory(run), config, 4, is_adapter=True, licence="other")
    assert card.startswith('---\nbase_model: "HuggingFaceTB/SmolLM2-135M-Instruct"\n')
    assert adapter_base("smollm2") == str(smollm2_folder()), "peft does not know our name"
    assert adapter_base("org/name") == "org/name"
    again = headwater("export", run, "--to", tmp_path / "best")
    assert (again.code, "exists and is not empty" in again.stderr) == (2, True)
    assert "use the number of a saved step, or best" in headwater("export", run, "--to", "x", "--step", "b").stderr
    assert "trained all weights" in headwater("export", run, "--to", "x", "--adapter").stderr


def test_a_copy_of_a_run_is_evaluated_and_exported_by_its_url(run, tmp_path, monkeypatch):
    monkeypatch.setattr("headwater.trainer.mirror.local_run", partial(local_run, root=tmp_path))  # instead of runs/
    place = f"file://{run.parent}/copy/all"
    evaluated = headwater("eval", place, "eval.num_prompts=4", "rollout.temperature=0.3")
    assert evaluated.code == 0, evaluated.stderr
    assert "Note: rollout.temperature=0.3: is for training and has no effect here" in evaluated.stdout
    assert headwater("export", place, "--to", tmp_path / "model").code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters()
    missing = headwater("export", f"{place}s", "--to", "x").stderr
    assert f"RUN = {place}s: no copy of a run (config.yaml is missing)" in missing


VLLM, HAS_VLLM = python_of("vllm")
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

model = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128)
sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
(done,) = model.generate({"prompt_token_ids": [5, 6, 7, 8]}, sampling)
print("TOKENS", json.dumps(done.outputs[0].token_ids))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
@pytest.mark.skipif(not HAS_VLLM, reason=f"NO REAL VLLM: it is not installed for {VLLM}; run `make setup-vllm`")
def test_an_exported_model_is_loaded_by_vllm(run, tmp_path):
    assert headwater("export", run, "--to", tmp_path / "model").code == 0
    (tmp_path / "generate.py").write_text(f"if __name__ == '__main__':\n{textwrap.indent(GENERATE, '    ')}")
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [VLLM, tmp_path / "generate.py", tmp_path / "model"], capture_output=True, text=True, check=False,
        timeout=PROCESS_LIMIT_S, env={**os.environ, **settings, "VLLM_HOST_IP": "127.0.0.1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    tokens = json.loads(done.stdout.partition("TOKENS")[2].splitlines()[0])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = torch.tensor([[5, 6, 7, 8]])
    for _ in range(8):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert tokens == expected[0, 4:].tolist()


@pytest.mark.slow
def test_exported_adapters_are_those_of_the_merged_model(tmp_path):
    from peft import PeftModel

    train_here("quickstart-lora", *CUT_DOWN, *NO_EVAL, f"run.root={tmp_path}", "run.name=lora")
    for form in ("--merge", "--adapter"):
        result = headwater("export", tmp_path / "lora", "--to", tmp_path / form, form)
        assert result.code == 0, result.stderr
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "--merge")
    base = load_model("tiny:qwen3", dtype="float32", device="cpu", seed=0)
    tokens = torch.arange(10, 30)[None]
    before = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "--adapter")
    torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits)
    assert not torch.equal(before, adapted(tokens).logits)


def test_a_run_that_only_evaluates(tmp_path):
    train_here("quickstart", *CUT_DOWN, f"run.root={tmp_path}", "run.name=only", "eval.only=true")
    records = RunDirectory(tmp_path / "only").read_metrics()
    assert [(each["kind"], each["step"]) for each in records] == [("eval", 0)]
    assert not (tmp_path / "only" / "checkpoints").exists()


def test_remax_measures_rewards_from_those_of_greedy_responses(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"{number}+{number}="}], "data_source": "sums", "ground_truth": "0"}
        for number in range(8)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_here(
        "quickstart", "remax", *CUT_DOWN, f"run.root={tmp_path}", "run.name=remax", "data.task_args={}",
        "data.num_train_rows=2048", "data.num_eval_rows=256", f"data.train=[{file}]", f"data.eval=[{file}]",
        "eval.num_prompts=0", "eval.every_steps=1", "eval.temperature=0", "rollout.max_new_tokens=6",
    )  # fmt: skip
    for step in (1, 2):
        # The evaluation before a step is greedy and has the weights that the step's responses are sampled with.
        evaluated = pq.read_table(tmp_path / "remax" / "eval" / f"step_{step - 1:06d}.parquet").to_pylist()
        greedy = {row["prompt"]: row["reward"] for row in evaluated}
        sampled = pq.read_table(tmp_path / "remax" / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
        assert len(sampled) == 8
        for row in sampled:
            own = [each for each, is_trained in zip(row["advantages"], row["loss_mask"], strict=True) if is_trained]
            assert own == pytest.approx([row["reward"] - greedy[row["prompt"]]] * len(own), abs=1e-6)
        assert any(row["reward"] != greedy[row["prompt"]] for row in sampled)


def test_memory_for_checkpoints_is_prepared_only_in_runs_that_write_them_while_they_train(tmp_path, monkeypatch):
    prepare, told = LocalLearner.prepare_snapshot, []
    monkeypatch.setattr(LocalLearner, "prepare_snapshot", lambda self: (told.append(self.status()), prepare(self)))
    every_step = "trainer.checkpoint_every_steps=1"
    for name, settings, count in [
        ("end", [], 0),
        ("waits", [every_step, "trainer.checkpoint_in_background=false"], 0),
        ("background", [every_step], 1),
    ]:
        told.clear()
        train_here("quickstart", *CUT_DOWN, *NO_EVAL, f"run.root={tmp_path}", f"run.name={name}", *settings)
        assert [each.num_optimizer_steps for each in told] == [0] * count, name
    assert same_weights(weights(tmp_path / "background", 2), weights(tmp_path / "waits", 2))


def fails(*settings: object) -> str:
    result = headwater("train", "quickstart", *CUT_DOWN, *settings)
    assert result.code == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def test_wrong_settings_are_named(tmp_path):
    root = f"run.root={tmp_path}"
    assert "there is nothing to evaluate on" in fails(root, "eval.only=true", *rows_of(tmp_path, 8)[:-1])
    empty = fails(root, *rows_of(tmp_path, 8)[:-1], f"data.eval=[{rows_of(tmp_path, 0)[-1]}]")
    assert "empty_0.jsonl" in empty
    assert "eval.temperature = 0 is greedy" in fails(root, "eval.top_p=0.9", "eval.temperature=0")
    assert "only metrics of evaluation" in fails(root, "trainer.best_metric=reward/mean")
    assert "trainer.total_epochs = 2 decides" in fails(root, "trainer.total_epochs=2")
    assert "nothing reads the reference" in fails(root, "reference.path=tiny:llama")
    unknown = fails(root, "trainer.best_metric=eval/accuracy", "eval.every_steps=1")
    assert "the evaluation of step 0 has no such metric; use one of eval/" in unknown
    tokenizer = load_tokenizer("tiny:qwen3")
    tokenizer.add_tokens(["<other>"])
    model = load_model("tiny:qwen3", dtype="float32", device="cpu", seed=0)
    model.resize_token_embeddings(len(tokenizer))
    save_model(model, tokenizer, tmp_path / "other")
    refused = fails(root, f"reference.path={tmp_path / 'other'}", "algorithm.kl_in_reward=0.1")
    assert "its tokenizer differs from that of model.path in 1 tokens, for example '<other>'" in refused


def rows_of(folder: Path, count: int) -> list[str]:
    """The settings of a run on a file, and last the file."""
    row = {"prompt": [{"role": "user", "content": "1+2="}], "data_source": "arithmetic", "ground_truth": "3"}
    file = folder / f"{'rows' if count else 'empty'}_{count}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(count)))
    return [
        "data.task_args={}",
        "data.num_train_rows=2048",
        "data.num_eval_rows=256",
        f"data.train=[{file}]",
        str(file),
    ]


def test_a_device_without_memory_is_told_with_settings_that_need_less(tmp_path, monkeypatch):
    def fail(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(LocalLearner, "update", fail)
    told = fails(f"run.root={tmp_path}", *NO_EVAL, "learner.max_tokens_per_microbatch=8192")
    assert "out of memory while updating the policy (CUDA out of memory. Tried to allocate 2.00 GiB.)" in told
    assert "learner.max_tokens_per_microbatch=4096 (now 8192): activations shrink to 50%" in told
    for setting in ("learner.checkpoint_activations=true", "engine.memory_fraction=", "lora.rank=16, in a new run"):
        assert setting in told
    assert "By their sizes, the largest holders are: " in told
    assert "by estimate" in told
    monkeypatch.undo()
    monkeypatch.setattr(LocalLearner, "compute", lambda self, batch, what: fail(self, batch))
    told = fails(f"run.root={tmp_path}", *NO_EVAL, "algorithm.old_logprobs=recompute")
    assert "out of memory while computing log-probs and values" in told
    assert "learner.max_tokens_per_forward_pass=" in told


def test_memory_that_runs_out_before_the_first_step_is_told_with_its_stage(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(LocalLearner, "supervise", fail)
    told = fails(f"run.root={tmp_path}", *NO_EVAL, "warm_start.num_steps=1")
    assert "out of memory while training on supervised examples" in told
    assert "learner.checkpoint_activations=true" in told
    monkeypatch.undo()
    monkeypatch.setattr(KVCache, "_allocate", fail)
    told = fails(f"run.root={tmp_path}/loading", *NO_EVAL)
    assert "out of memory while loading the engine" in told
    assert "change one, then start again:" in told
    assert not (tmp_path / "loading").exists(), "nothing was done"


def test_a_checkpoint_that_fails_in_the_background_ends_the_run_and_leaves_the_one_before(tmp_path, monkeypatch):
    write, folder = Snapshot.write, tmp_path / "full" / "checkpoints" / ".step_000002"

    def full(self):
        if folder.exists():
            (folder / "half").write_bytes(b"half")
            raise OSError(28, os.strerror(28), str(folder))
        write(self)

    monkeypatch.setattr(Snapshot, "write", full)
    settings = [f"run.root={tmp_path}", "run.name=full", *NO_EVAL, "trainer.checkpoint_every_steps=1"]
    told = fails(*settings, "trainer.total_steps=9")
    assert "step_000002: the checkpoint cannot be written: the disk is full" in told
    run = RunDirectory(tmp_path / "full")
    assert run.checkpoint_steps() == [1]
    assert damage(run.checkpoint(1)) == ()
    assert not list(run.checkpoints.glob(".*"))
    assert len(metrics(run.path, "train")) < 9, "the run ended at the next boundary"
    monkeypatch.undo()
    train_here("--resume", run.path, "trainer.total_steps=3")
    train_here(
        "quickstart", *CUT_DOWN, *settings[2:], f"run.root={tmp_path}", "run.name=waits", "trainer.total_steps=3",
        "trainer.checkpoint_in_background=false",
    )  # fmt: skip
    assert same_weights(weights(run.path, 3), weights(tmp_path / "waits", 3))


SLOW_REWARD = """
import time
from headwater.learner.learner import LocalLearner

computed = []
compute = LocalLearner.compute

def noted(self, *arguments):
    computed.append(True)
    return compute(self, *arguments)

LocalLearner.compute = noted

def compute_score(data_source, solution_str, ground_truth, extra_info):
    deadline = time.monotonic() + 600
    while extra_info.get("wait") != "no" and not computed and time.monotonic() < deadline:
        time.sleep(0.01)
    if solution_str == "fails":
        raise ValueError(solution_str)
    return {"score": len(set(solution_str)) / 9, "waited": float(bool(computed))}
"""


def test_log_probs_are_computed_while_responses_are_scored(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalLearner, "compute", LocalLearner.compute)  # the reward functions replace it
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    (tmp_path / "quick.py").write_text(SLOW_REWARD.replace('!= "no"', '== "yes"'))
    common = ["quickstart", *CUT_DOWN, *NO_EVAL, f"run.root={tmp_path}", "algorithm.old_logprobs=recompute"]
    late = [f"reward.function={tmp_path}/slow.py:compute_score", "reward.join=late", "reward.where=threads"]
    train_here(*common, *late, "run.name=late", "reward.workers=64", "reward.timeout_s=1200")
    train_here(*common, f"reward.function={tmp_path}/quick.py:compute_score", "run.name=early", "reward.where=threads")
    runs = [tmp_path / "late", tmp_path / "early"]
    assert metrics(runs[0], "train")[0]["reward/waited/mean"] == 1.0
    assert len({each["reward/mean"] for run in runs for each in metrics(run, "train")}) == 2
    assert same_weights(*(weights(run, 2) for run in runs))
    rows = pq.read_table(runs[0] / "rollouts" / "step_000001.parquet").to_pylist()
    assert all(row["reward"] == len(set(row["response"])) / 9 and "reward_late" not in row for row in rows)
    refused = fails(
        "reward.join=late", "rollout.max_staleness=1", "algorithm.filter_groups=true", "rollout.max_retries=1"
    )
    for part in (
        "does not go with rollout.max_staleness = 1",
        "rollout.max_retries = 1",
        "algorithm.filter_groups = True",
        "would save no time",
    ):
        assert part in refused
