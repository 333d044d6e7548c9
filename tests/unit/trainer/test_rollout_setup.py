"""Rollouts as configured: greedy baselines and the filter of groups, on the real engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater.config.load import load_config
from headwater.core.capabilities import Capabilities
from headwater.core.errors import ConfigError, DataError
from headwater.core.media import MediaBlock, MediaContent, PlacedMedia
from headwater.rollout.source import PromptStream
from headwater.rollout.staleness import Admission
from headwater.trainer.request_checks import Needs
from headwater.trainer.rollout_setup import build_rollout, describe, make_admission, num_left_out

ROOT = Path(__file__).parents[3]
SMALL = [
    "data.num_train_rows=50", "data.num_eval_rows=50", "warm_start.num_steps=0", "eval.temperature=0",
    f"reward.function={ROOT}/tests/integration/varied_reward.py:compute_score",
]  # fmt: skip


@pytest.fixture
def rollout():
    opened = []

    def build(*overrides: str):
        config = load_config("quickstart", [*SMALL, *overrides]).config
        opened.append(build_rollout(config, config.model.path))
        return opened[-1]

    yield build
    for each in opened:
        each.close()


def stream(parts) -> PromptStream:
    return PromptStream(parts.eval_data, seed=0, shuffle=False)


def test_the_baseline_of_remax_is_what_greedy_decoding_scores(rollout):
    parts = rollout("algorithm.advantage=remax", "rollout.temperature=2")
    batch = parts.train_rollouts.rollout_batch(stream(parts).take(8))
    greedy = parts.eval_rollouts.rollout_batch(stream(parts).take(8))
    assert [group.baseline for group in batch.groups] == [each.reward for each in greedy.trajectories]
    assert len({group.baseline for group in batch.groups}) > 1


def test_other_advantages_generate_no_greedy_response(rollout):
    parts = rollout("algorithm.advantage=rloo")
    assert parts.train_rollouts.rollout_batch(stream(parts).take(2)).baselines() is None


def test_a_filter_keeps_groups_that_differ_and_evaluation_keeps_all(rollout, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(ground_truth in '02468' and len(solution_str) % 2)\n"
    )
    parts = rollout(
        "algorithm.filter_groups=true", f"reward.function={file}:compute_score", "trainer.num_prompts_per_step=4"
    )
    batch = parts.train_rollouts.prepare_batch(stream(parts))
    assert len(batch.groups) == 4
    assert all(len({each.reward for each in group.trajectories}) == 2 for group in batch.groups)
    assert batch.dropped
    assert len(parts.eval_rollouts.rollout_batch(stream(parts).take(20)).groups) == 20


def admission_of(*overrides: str) -> Admission:
    return make_admission(load_config("quickstart", [*SMALL, *overrides]).config)


def test_synchronous_rollouts_run_in_waves_unless_the_engine_is_deterministic():
    assert admission_of().in_waves
    assert not admission_of("engine.deterministic=true").in_waves
    assert not admission_of("rollout.max_staleness=1").in_waves


def test_admission_is_what_the_config_says():
    admission = admission_of(
        "rollout.max_staleness=3", "rollout.on_stale=drop", "rollout.max_concurrent_groups=7", "trainer.total_steps=5",
        "trainer.num_prompts_per_step=6", "eval.every_steps=0",
    )  # fmt: skip
    assert (admission.max_staleness, admission.on_stale, admission.max_concurrent) == (3, "drop", 7)
    assert (admission.batch_size, admission.num_batches) == (6, 5)


class Rows(list):
    """A custom dataset that has not measured its prompts."""


class MeasuredRows(Rows):
    longest_prompt = 12
    num_filtered = 3


def test_the_first_rows_may_be_unreadable_if_the_run_drops_them(rollout):
    class Holed(MeasuredRows):
        def __getitem__(self, index):
            if index == 0:
                raise DataError("row 0: images[0]: no such file")
            return super().__getitem__(index)

    parts = rollout()
    rows = Holed([parts.eval_data[0]] * 2)
    stops, drops = (
        load_config("quickstart", [*SMALL, f"rollout.on_failure={each}"]).config for each in ("stop", "drop")
    )
    parts.check_prompts(drops, rows, "data.train")
    for config, key in ((stops, "data.train"), (drops, "data.eval")):
        with pytest.raises(DataError, match="row 0"):
            parts.check_prompts(config, rows, key)


def test_a_custom_dataset_may_tell_its_longest_prompt_and_what_it_left_out(rollout):
    parts = rollout()
    rows = [parts.eval_data[0]]
    longer = ["data.max_prompt_tokens=100000000", "learner.max_tokens_per_microbatch=200000000"]
    config = load_config("quickstart", [*SMALL, *longer]).config
    with pytest.raises(ConfigError, match=r"the longest prompt of data\.train \(100000000 tokens\)"):
        parts.check_prompts(config, Rows(rows), "data.train")
    parts.check_prompts(config, MeasuredRows(rows), "data.train")
    assert (num_left_out(Rows(rows)), num_left_out(MeasuredRows(rows))) == (0, 3)
    assert describe(MeasuredRows(rows), "training") == "1 training prompts (3 over data.max_prompt_tokens left out)"


def test_rows_with_images_are_refused_before_the_first_rollout(rollout):
    parts = rollout()
    shown = PlacedMedia(MediaContent.of("image", [b"picture"]), (MediaBlock(1, 2),))
    pictured = [replace(parts.eval_data[0], media=(shown,))]
    config = load_config("quickstart", SMALL).config
    with pytest.raises(ConfigError, match=r"data\.train: row .* has images or videos, which rollout\.backend = emb"):
        parts.check_prompts(config, Rows(pictured), "data.train")
    own = replace(config, rollout=replace(config.rollout, workflow="mine.py:Shows"))
    parts.check_prompts(own, Rows(pictured), "data.train")


def test_a_row_with_an_image_among_rows_of_text_is_refused(rollout):
    parts = rollout()
    shown = PlacedMedia(MediaContent.of("image", [b"picture"]), (MediaBlock(1, 2),))
    texts = [parts.eval_data[number] for number in range(20)]
    mixed = [*texts, replace(texts[0], uid="pictured", media=(shown,))]
    config = load_config("quickstart", SMALL).config
    parts.check_prompts(config, Rows(texts), "data.train")
    with pytest.raises(ConfigError, match=r"data\.train: row pictured has images or videos"):
        parts.check_prompts(config, Rows(mixed), "data.train")


def test_a_server_that_joins_is_checked_without_reading_the_data_again(rollout):
    parts = rollout()
    image, film = (PlacedMedia(MediaContent.of(kind, [b"picture"]), (MediaBlock(1, 2),)) for kind in ("image", "video"))
    text = parts.eval_data[0]
    rows = Rows([text, replace(text, uid="pictured", media=(image,)), replace(text, uid="filmed", media=(film,))])
    config = load_config("quickstart", SMALL).config

    def joining(*, media=False, videos=False):
        return SimpleNamespace(capabilities=Capabilities(media=media, videos=videos), limits=parts.engine.limits)

    whole = Capabilities(media=True, videos=True)
    needs, of_texts = (Needs.of(config, whole, each, "data.train") for each in (rows, Rows([text])))
    rows.clear()
    needs.check(config, joining(media=True, videos=True))
    for can, uid in ({"media": True}, "filmed"), ({}, "pictured"):
        with pytest.raises(ConfigError, match=f"row {uid}"):
            needs.check(config, joining(**can))
    of_texts.check(config, joining())
    short = replace(parts.engine.limits, max_request_tokens=8)
    with pytest.raises(ConfigError, match=r"the longest prompt of data\.train"):
        of_texts.check(config, SimpleNamespace(capabilities=whole, limits=short))
