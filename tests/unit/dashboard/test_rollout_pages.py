"""Rollouts: listings, groups, one rollout, and every value of every token."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from dashboard.parts import TEXT, add_metrics, make_run, save_step, served
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.records import Trajectory
from headwater.dashboard.vocabulary import Vocabulary
from headwater.trainer.tables import write_rollouts


def test_steps_and_the_rollouts_of_one(client, runs_dir):
    steps = client.get("/runs/first/steps")
    assert [each["step"] for each in steps["steps"]] == [1, 2, 3]
    listed = client.get("/runs/first/rollouts", step=2)
    assert (listed["total"], listed["is_complete"]) == (12, True)
    assert [row["id"] for row in listed["rollouts"]] == [f"step_000002:{row}" for row in range(12)]
    row = listed["rollouts"][5]
    saved = pq.read_table(runs_dir / "first/rollouts/step_000002.parquet").slice(5, 1).to_pylist()[0]
    assert (row["uid"], row["sample"], row["reward"]) == (saved["uid"], saved["sample"], saved["reward"])
    assert row["length"] == len(saved["tokens"]) - saved["prompt_length"]
    assert (row["tool_calls"], row["failures"], row["turns"]) == (1, 0, 2)
    assert row["gap"] == pytest.approx(
        max(abs(-0.75 - each) for each, kept in zip(saved["logprobs"], saved["loss_mask"], strict=True) if kept)
    )
    assert row["advantage"] == 0.25
    assert client.get("/runs/first/rollouts", step=3, source="eval")["rollouts"][0]["id"] == "eval.step_000003:0"
    assert client.error("/runs/first/rollouts", 404, step=9)[0] == "not_found"


def test_rollouts_are_sorted_filtered_and_paged(client):
    def ids(**given):
        return [row["id"].partition(":")[2] for row in client.get("/runs/first/rollouts", step=1, **given)["rollouts"]]

    assert ids(sort="reward") == [str(row) for row in range(11, -1, -1)]
    assert ids(sort="reward", order="asc", limit=3, offset=2) == ["2", "3", "4"]
    assert ids(sort="failures", limit=1) == ["2"], "of equal ones, the first"
    assert ids(stop_reason="length") == ["1", "3", "5", "7", "9", "11"]
    assert ids(min_reward=2.0, max_reward=2.25) == ["4", "5", "6"]
    assert ids(uid="row/2", tools="failed") == ["10", "11"]
    assert ids(tools="none") == ["0", "4", "8"]
    assert ids(text="NEEDLE") == ["0", "1", "2", "3"]
    assert ids(text="nothing like it") == ids(uid="no such") == ids(data_source="no such") == []
    for wrong in (
        {"sort": "x"},
        {"limit": 0},
        {"limit": 1000},
        {"min_reward": "x"},
        {"min_reward": "nan"},
        {"step": "1e3"},
    ):
        assert client.error("/runs/first/rollouts", 400, **({"step": 1} | wrong))[0] == "bad_request"


def test_listings_over_all_steps(client):
    listed = client.indexed("/runs/first/rollouts")
    assert listed["total"] == 36
    assert listed["rollouts"][0]["id"] == "step_000003:0", "the newest step first"
    assert listed["stop_reasons"] == ["length", "stop"]
    best = client.get("/runs/first/rollouts", sort="reward", limit=2)["rollouts"]
    assert [row["id"] for row in best] == ["step_000003:11", "step_000003:10"]
    found = client.get("/runs/first/rollouts", text="needle 2")
    assert [row["step"] for row in found["rollouts"]] == [2] * 4
    assert found["is_complete"]
    first = client.get("/runs/first/rollouts", text="needle", limit=2)
    assert (first["is_complete"], len(first["rollouts"])) == (False, 2)
    more = client.get("/runs/first/rollouts", text="needle", limit=200, cursor=first["next_cursor"])
    assert more["total"] == 8
    assert client.error("/runs/first/rollouts", 400, text="needle", cursor="../x")[0] == "bad_request"
    by_reward = client.get("/runs/first/rollouts", text="needle", sort="reward", order="asc", limit=5, offset=1)
    assert by_reward["total"] == 12
    assert [row["reward"] for row in by_reward["rollouts"]] == pytest.approx([1.1, 1.2, 1.3, 2.0, 2.1])
    oldest = client.get("/runs/first/rollouts", text="needle", sort="place", order="desc", limit=2)
    assert [row["id"] for row in oldest["rollouts"]] == ["step_000001:3", "step_000001:2"]


def test_groups_side_by_side_and_a_prompt_over_steps(client):
    groups = client.get("/runs/first/groups", step=1, sort="reward")
    assert [each["uid"] for each in groups["groups"]] == ["row/2", "row/1", "row/0"]
    assert groups["groups"][0]["rewards"] == pytest.approx([3.0, 3.1, 3.2, 3.3])
    assert [each["uid"] for each in client.get("/runs/first/groups", step=1, text="needle")["groups"]] == ["row/0"]
    group = client.get("/runs/first/group", step=1, uid="row/1")
    assert len(group["rollouts"]) == 4
    message = group["rollouts"][0]["messages"][1]
    assert message["content"] == TEXT
    assert message["tool_calls"] == [{"name": "add", "arguments": '{"a": 1}'}]
    assert client.error("/runs/first/group", 404, step=1, uid="x")[0] == "not_found"
    client.indexed("/runs/first/rollouts")
    prompt = client.get("/runs/first/prompt", uid="row/0")
    assert [each["step"] for each in prompt["steps"]] == [1, 2, 3]
    assert prompt["steps"][0]["best"]["reward"] == 1.3
    assert prompt["steps"][0]["worst"]["id"] == "step_000001:0"


def test_a_rollout_with_every_value_of_every_token(client, runs_dir):
    saved = pq.read_table(runs_dir / "first/rollouts/step_000002.parquet").to_pylist()[5]
    rollout = client.get("/runs/first/rollout", id="step_000002:5")
    assert (rollout["previous"], rollout["next"]) == ("step_000002:4", "step_000002:6")
    assert [each["id"] for each in rollout["siblings"]] == [f"step_000002:{row}" for row in range(4, 8)]
    assert rollout["turn_rewards"] == saved["turn_rewards"]
    assert rollout["reward_info"] == {"acc": saved["reward"]}
    assert rollout["policy_versions"] == [1, 2]
    assert [kind for *_, kind in rollout["segments"]] == ["prompt", "sampled", "inserted", "sampled"]
    tokens = client.get("/runs/first/tokens", id="step_000002:5")
    count = tokens["total"]
    assert tokens["ids"] == saved["tokens"]
    assert "".join(tokens["texts"]) == tiny.tokenizer().decode(saved["tokens"])
    assert bytes.fromhex("".join(tokens["bytes"])).decode() == "".join(tokens["texts"])
    assert tokens["is_split"], "the tiny tokenizer splits the smiley"
    for place in range(count):
        version, mask = saved["versions"][place], saved["loss_mask"][place]
        assert (tokens["versions"][place], tokens["mask"][place]) == (version, mask)
        assert tokens["logprobs"][place] == (None if version < 0 else pytest.approx(saved["logprobs"][place]))
        learner = saved["learner_logprobs"][place] if mask else None
        assert tokens["learner_logprobs"][place] == learner
        expected = pytest.approx(learner - saved["logprobs"][place], abs=1e-6) if mask else None
        assert tokens["difference"][place] == expected
        assert tokens["advantages"][place] == (0.25 if mask else None)
        assert tokens["entropies"][place] == (1.5 if mask else None)
        in_prompt = place < saved["prompt_length"]
        assert tokens["kinds"][place] == (0 if in_prompt else 1 if mask else 2 if version >= 0 else 3)
        assert tokens["turns"][place] == (-1 if version < 0 else version - 1)
    assert tokens["values"] is None
    (worst,) = client.get("/runs/first/mismatches", id="step_000002:5", count=1)["tokens"]
    differences = [abs(each or 0.0) for each in tokens["difference"]]
    assert abs(worst["difference"]) == max(differences)
    assert worst["place"] == int(np.argmax(differences))


@given(offset=st.integers(0, 40), limit=st.integers(1, 7))
def test_pages_of_tokens_are_parts_of_the_whole(client, offset, limit):
    whole = client.get("/runs/first/tokens", id="step_000002:5")
    page = client.get("/runs/first/tokens", id="step_000002:5", offset=offset, limit=limit)
    for name in ("ids", "texts", "bytes", "kinds", "logprobs", "difference", "turns"):
        assert page[name] == whole[name][offset : offset + limit], name


def test_the_text_of_any_bytes_is_that_of_the_whole(tmp_path):
    pieces = [bytes([number]) for number in range(256)] + [b"ab", "é".encode()]
    table = pa.table({"bytes": pa.array(pieces, pa.binary())}).replace_schema_metadata({b"is_exact": b"1"})
    pq.write_table(table, tmp_path / "t.parquet")
    vocabulary = Vocabulary(tmp_path / "t.parquet")

    @given(st.text(max_size=8))
    def check(text):
        tokens = list(text.encode("utf-8", "ignore"))
        spelled = vocabulary.spell(tokens)
        assert "".join(spelled.texts).encode() == bytes(tokens)

    check()
    assert vocabulary.spell([0xC3, 999, 65]).texts == ["", "�⟨999⟩", "A"]
    assert vocabulary.spell([256, 257]).texts == ["ab", "é"]


def test_replies_that_were_tokenised_again_are_marked(tmp_path):
    run = make_run(tmp_path, num_steps=1)
    encode = tiny.tokenizer().encode
    prompt, again, reply = (
        encode("Q ", add_special_tokens=False),
        encode("old reply", add_special_tokens=False),
        encode("new", add_special_tokens=False),
    )
    tokens = (*prompt, *again, *reply)
    piece = Trajectory(
        "row/0", 0, tokens, len(prompt) + len(again), (0,) * (len(tokens) - len(reply)) + (1,) * len(reply),
        (0.0,) * len(tokens), (-1,) * (len(tokens) - len(reply)) + (0,) * len(reply), 1.0, "stop",
        info={"num_pieces": 2, "response_text": "new"},
        messages=({"role": "user", "content": "Q"}, {"role": "assistant", "content": "old reply"},
                  {"role": "assistant", "content": "new"}),
    )  # fmt: skip
    write_rollouts(run.free_file("rollouts", "step_000007", ".parquet"), 7, [(tiny.prompt(uid="row/0"), piece)])
    with served(tmp_path) as client:
        marked = client.get("/runs/first/tokens", id="step_000007:0")["retokenised"]
        assert marked == list(range(len(prompt), len(prompt) + len(again)))


def test_a_million_tokens_are_paged(tmp_path):
    run, count = make_run(tmp_path, num_steps=1), 1_000_000
    table = pq.read_table(save_step(run, 2)).slice(0, 1)
    for name, value in (
        ("tokens", 70),
        ("loss_mask", 1),
        ("versions", 3),
        ("logprobs", -0.5),
        ("learner_logprobs", -0.25),
    ):
        kind = table.schema.field(name).type.value_type
        long = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.full(count, value)).cast(kind))
        table = table.set_column(table.schema.get_field_index(name), name, long)
    pq.write_table(table, run.path / "rollouts" / "step_000009.parquet")
    with served(tmp_path) as client:
        assert client.get("/runs/first/rollout", id="step_000009:0")["num_tokens"] == count
        page = client.get("/runs/first/tokens", id="step_000009:0", offset=999_990, limit=100)
        assert (page["total"], page["ids"]) == (count, [70] * 10)
        assert page["advantages"] is None, "a column of another length is left out"
        assert client.error("/runs/first/tokens", 400, id="step_000009:0", limit=100_000)[0] == "bad_request"
        assert client.get("/runs/first/mismatches", id="step_000009:0")["tokens"][0]["difference"] == 0.25


_OPEN_LONG = """
import re, sys
from pathlib import Path

from headwater.dashboard.answers import Answers
from headwater.dashboard.plain_values import encoded
from headwater.dashboard.runs import Place, Runs

answers = Answers(Runs(Place.of(Path(sys.argv[1]))))
listed = answers.of_run("first", "rollouts", {"step": "9"})["rollouts"]
assert [row["advantage"] for row in listed] == [0.5] * len(listed)
for row in listed:
    for what in ("rollout", "tokens", "mismatches"):
        encoded(answers.of_run("first", what, {"id": row["id"]}))
most_kb = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print(len(listed), int(most_kb) // 1024)
"""


def test_opening_rollouts_of_a_million_tokens_takes_little_memory(tmp_path):
    """Two of them, with all columns, in a process of their own."""
    run, count, num_rows = make_run(tmp_path, num_steps=1), 1_000_000, 2
    rng, table = np.random.default_rng(0), pq.read_table(save_step(run, 2)).slice(0, num_rows)
    offsets = pa.array(np.arange(num_rows + 1) * count, pa.int32())
    noise = pa.array(-rng.random(num_rows * count, np.float32))
    ids, ones = pa.array(rng.integers(6, 500, num_rows * count)), pa.array(np.ones(num_rows * count, np.int64))
    whole = {"tokens": ids, "loss_mask": ones, "versions": ones, "advantages": pa.array(np.full(len(ids), 0.5))}
    for name in ("logprobs", "learner_logprobs", "returns", "values", "reference_logprobs", "entropies"):
        whole[name] = noise.cast(pa.float64()) if name == "logprobs" else noise
    kept = table.drop_columns([name for name in whole if name in table.column_names])
    for name, values in whole.items():
        kept = kept.append_column(name, pa.ListArray.from_arrays(offsets, values))
    pq.write_table(kept, run.path / "rollouts" / "step_000009.parquet", row_group_size=1)
    done = subprocess.run([sys.executable, "-c", _OPEN_LONG, run.path], check=True, capture_output=True, text=True)
    opened, most_mb = map(int, done.stdout.split())
    assert opened == num_rows
    assert most_mb < 240, "with an index over a million rollouts, it is to stay below 300"


def test_a_step_that_was_computed_again_is_shown_once(tmp_path):
    run = make_run(tmp_path, num_steps=2)
    newer = save_step(run, 2, num_prompts=1)
    assert newer.name == "step_000002-2.parquet"
    with served(tmp_path) as client:
        assert client.get("/runs/first/rollouts", step=2)["rollouts"][0]["id"] == "step_000002-2:0"
        assert client.indexed("/runs/first/rollouts")["total"] == 16
        assert client.get("/runs/first/rollout", id="step_000002:11")["sample"] == 3, "an old address still works"
        steps = client.get("/runs/first/steps")
        assert [(each["step"], each["num"]) for each in steps["steps"]] == [(1, 12), (2, 4)]
        assert steps["total"] == 16


@pytest.mark.parametrize("is_copied", [False, True])
def test_steps_that_a_resume_discarded_are_not_shown(tmp_path, is_copied):
    """Whatever is asked for first, and in a copy, in which all files are newer than the resume."""
    run = make_run(tmp_path, num_steps=4)
    now = time.time()
    if not is_copied:
        for path in (*run.path.glob("rollouts/*"), *run.path.glob("eval/*")):
            os.utime(path, (now - 1000.0, now - 1000.0))
    run.append_metrics({"kind": "resume", "step": 2, "time": now - 500.0})
    add_metrics(run, 3)
    save_step(run, 3, num_prompts=1)
    with served(tmp_path) as client:
        assert [each["step"] for each in client.get("/runs/first/steps")["steps"]] == [1, 2, 3]
        assert client.get("/runs/first/rollouts", step=3)["total"] == 4
        assert [each["step"] for each in client.get("/runs/first/steps", source="eval")["steps"]] == []
        assert client.error("/runs/first/rollouts", 404, step=4)[0] == "not_found"
        assert client.indexed("/runs/first/rollouts")["total"] == 28


def test_a_missing_reward_is_not_zero(tmp_path):
    run = make_run(tmp_path, num_steps=1)
    path = run.path / "rollouts" / "step_000001.parquet"
    table = pq.read_table(path)
    rewards = [None, float("nan"), 1.0, 2.0, None, None, None, None, *[-1.0] * 4]
    place = table.schema.get_field_index("reward")
    pq.write_table(table.set_column(place, "reward", pa.array(rewards, pa.float64())), path)
    pq.write_table(table.drop_columns(["reward"]), run.path / "rollouts" / "step_000002.parquet")
    with served(tmp_path) as client:
        groups = client.get("/runs/first/groups", step=1, sort="reward", order="asc")["groups"]
        assert [(each["uid"], each["reward_mean"]) for each in groups] == [
            ("row/2", -1.0), ("row/0", 1.5), ("row/1", None)
        ]  # fmt: skip
        assert groups[1]["rewards"] == [None, None, 1.0, 2.0]
        assert client.get("/runs/first/rollouts", step=2, min_reward=-1, max_reward=1)["total"] == 0
        assert client.get("/runs/first/groups", step=2)["groups"][0]["reward_min"] is None
        client.indexed("/runs/first/rollouts")
        first = client.get("/runs/first/prompt", uid="row/0")["steps"][0]
        assert (first["best"]["reward"], first["worst"]["reward"]) == (2.0, 1.0)


def test_files_that_cannot_be_read_do_not_hide_the_others(tmp_path):
    run = make_run(tmp_path)
    whole = (run.path / "rollouts" / "step_000002.parquet").read_bytes()
    (run.path / "rollouts" / "step_000002.parquet").write_bytes(whole[: len(whole) // 2])
    (run.path / "rollouts" / "step_000003.parquet").write_bytes(b"")
    pq.write_table(pa.table({"x": [1]}), run.path / "rollouts" / "step_000004.parquet")
    (run.path / "rollouts" / ".step_000005.parquet").write_bytes(b"being written")
    (run.path / "rollouts" / "step_x.parquet").write_bytes(b"foreign")
    with served(tmp_path) as client:
        listed = client.indexed("/runs/first/rollouts")
        assert listed["total"] == 13
        assert len([each for each in listed["problems"] if "cannot be read" in each]) == 2
        for step in (2, 3):
            code, message = client.error("/runs/first/rollouts", 422, step=step)
            assert code == "unreadable"
            assert f"step_00000{step}.parquet" in message
        assert client.error("/runs/first/rollout", 422, id="step_000002:0")[0] == "unreadable"
        assert client.get("/runs/first/rollouts", step=4)["rollouts"][0]["uid"] == ""
        assert client.get("/runs/first/rollout", id="step_000004:0")["num_tokens"] == 0
        assert client.get("/runs/first/tokens", id="step_000004:0")["ids"] == []
        run.tokens_file.unlink()
        told = client.get("/runs/first/tokens", id="step_000001:0")
        assert "tokens.parquet is missing" in told["problems"][0]
        assert told["texts"][0].startswith("⟨")
        (run.path / "rollouts" / "step_000001.parquet").unlink()
        assert client.error("/runs/first/rollout", 404, id="step_000001:0")[0] == "not_found"
