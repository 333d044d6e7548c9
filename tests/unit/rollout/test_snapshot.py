"""A snapshot goes through its file to the last bit."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.executor_parts import Rows, draw_of
from rollout.stale_parts import finished

from headwater.core.errors import RunError
from headwater.core.media import MediaBlock, MediaContent, PlacedMedia
from headwater.core.records import MAX_REWARD, Trajectory
from headwater.observe.media_store import MediaStore
from headwater.rollout.flight import Dispatch
from headwater.rollout.group import Group, PromptDraw
from headwater.rollout.snapshot import RolloutSnapshot
from headwater.rollout.staleness import Finished


def again(index: int, epoch: int) -> PromptDraw:
    return replace(draw_of(index), epoch=epoch)


def through_a_file(snapshot: RolloutSnapshot) -> RolloutSnapshot:
    return RolloutSnapshot.from_json(snapshot.to_json(), again)


def test_a_snapshot_of_nothing():
    snapshot = RolloutSnapshot(cursor={"next": 0}, ledger={"next_id": 0})
    assert through_a_file(snapshot) == snapshot


def test_what_was_in_flight_is_drawn_again_with_its_number_and_attempt():
    in_flight = (Dispatch(7, again(3, 0)), Dispatch(9, again(4, 2), attempt=1))
    snapshot = RolloutSnapshot(Rows().state_dict(), {}, in_flight=in_flight)
    assert through_a_file(snapshot) == snapshot
    # A prompt is not written down: its row and epoch say which it was.
    assert "1+1=" not in snapshot.to_json()


def test_finished_groups_keep_versions_requests_and_baseline():
    group = finished(5, (3, 3, 4), (4,))
    kept = replace(
        group,
        group=replace(group.group, baseline=0.1 + 0.2),
        requests={(0, 0): ((3, 2),), (0, 1): ((4, 1),), (-1, 0): ()},
    )
    read = through_a_file(RolloutSnapshot({}, {}, finished=(kept,))).finished[0]
    assert read == kept
    assert (read.version, read.oldest) == (3, 3)


def test_images_are_stored_beside_the_snapshot(tmp_path):
    group = finished(5, (3, 3, 4), (4,))
    picture = MediaContent.of("image", [b"a picture"])
    placed = PlacedMedia(picture, (MediaBlock(0, 1, (1, 1, 1)),))
    shown = [replace(each, media=(placed,)) for each in group.group.trajectories]
    kept = replace(group, group=replace(group.group, trajectories=tuple(shown)))
    snapshot = RolloutSnapshot({}, {}, finished=(kept,))
    assert snapshot.contents() == [picture], "once, although two trajectories have it"
    store = MediaStore(tmp_path / "media")
    for content in snapshot.contents():
        store.add(content)
    assert RolloutSnapshot.from_json(snapshot.to_json(), again, store.read) == snapshot
    with pytest.raises(RunError, match="no record says where they are stored"):
        through_a_file(snapshot)
    for path in (tmp_path / "media").iterdir():
        path.write_bytes(b"other")
    with pytest.raises(RunError, match="is not the image that was written"):
        RolloutSnapshot.from_json(snapshot.to_json(), again, store.read)


floats = st.floats(allow_nan=False)
leaves = st.none() | st.booleans() | st.integers() | floats | st.text(max_size=5)
infos = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(floats, min_size=1, max_size=6),
    st.floats(-MAX_REWARD, MAX_REWARD),
    st.dictionaries(st.text(max_size=4), infos, max_size=3),
    st.booleans(),
)
def test_numbers_and_nested_info_come_back_exactly(logprobs, reward, info, per_turn):
    count = len(logprobs)
    trajectory = Trajectory(
        "row1", 0, (5, *range(count)), 1, (0,) + (1,) * count, (0.0, *logprobs), (-1,) + (2,) * count, reward, "length",
        (reward,) if per_turn else (), info,
    )  # fmt: skip
    kept = Finished(Dispatch(1, again(1, 0)), Group(draw_of(1).prompt, (trajectory,), baseline=reward), 2, 2, {})
    (read,) = through_a_file(RolloutSnapshot({}, {}, finished=(kept,))).finished
    assert read == kept
    assert repr(read) == repr(kept)  # also minus zero, and tuples that are no lists


def test_a_logprob_of_minus_infinity_is_kept():
    trajectory = Trajectory("row1", 0, (5, 6), 1, (0, 1), (0.0, -math.inf), (-1, 0), 0.0, "stop")
    kept = Finished(Dispatch(1, again(1, 0)), Group(draw_of(1).prompt, (trajectory,)), 0, 0, {})
    assert through_a_file(RolloutSnapshot({}, {}, finished=(kept,))).finished == (kept,)


def test_the_file_is_plain_json():
    assert json.loads(RolloutSnapshot({"next": 4}, {"next_id": 2}).to_json())["cursor"] == {"next": 4}
