"""Learning from pictures: packs, gradients of the vision tower, frozen parts, adapters, checkpoints."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pictures
import pytest
import torch

from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError
from headwater.learner.freeze import vision_modules
from headwater.learner.packed_module import PolicyModule
from headwater.learner.packing import Pack, check_lengths, pack_rows, read_rows
from headwater.learner.pictures_ahead import PicturesAhead
from headwater.models.vision import VisionProcessor
from headwater.rollout.group import pad_trajectories

MODEL = pictures.model()
VIDEO = pictures.video(7)
ONE, TWO, WIDE = (pictures.picture(seed, width) for seed, width in ((1, 56), (2, 56), (3, 112)))


def rows(name: str = pictures.NAME):
    """Two groups whose prompts differ only in the picture, one with two pictures, one that is shown one later, text."""
    return [
        *pictures.group(1, [ONE], 3, name=name),
        *pictures.group(2, [TWO], 3, name=name),
        *pictures.group(3, [WIDE, ONE], 2, name=name),
        *pictures.group(4, [TWO], 2, later=[WIDE], name=name),
        *pictures.group(5, [], 2, name=name),
    ]


def packs(data: DataProto, max_tokens: int = 10_000, **settings) -> list[Pack]:
    return pack_rows(read_rows(data), data.batch["response_mask"].shape[1], max_tokens, **settings)


def test_batches_carry_media_and_their_bytes_once():
    samples = pictures.group(1, [pictures.picture(1, 112, 112)], 8) + pictures.group(2, [], 1)
    # As after a checkpoint: equal contents that are different objects.
    samples = [pickle.loads(pickle.dumps(each)) for each in samples]
    data = pad_trajectories(samples, 0)
    assert "media" not in pad_trajectories(samples[-1:], 0).non_tensor_batch
    assert data.non_tensor_batch["media"].tolist() == [each.media for each in samples]
    content = samples[0].media[0].content
    assert pickle.dumps(data).count(content.frames[0]) == 1
    chosen = DataProto.concat([data[[8, 0]], data[[3]]])
    assert chosen.non_tensor_batch["media"].tolist() == [(), samples[0].media, samples[3].media]


def test_a_picture_is_packed_once_and_different_pictures_never_share_a_prompt():
    samples = rows()
    [pack] = packs(pad_trajectories(samples, 0))
    assert [each.digest for each in pack.media.contents] == [ONE.digest, TWO.digest, WIDE.digest]
    # The prompts of the first two groups have the same tokens.
    assert samples[0].tokens[: samples[0].prompt_length] == samples[3].tokens[: samples[3].prompt_length]
    # The fourth group shares the prompt of the second. Each of its two samples is shown another picture later.
    assert len(pack.media.places) == 4 + 4 + (8 + 4) + 2 * 8
    image = MODEL.config.image_token_id
    assert (pack.input_ids == image).nonzero()[:, 0].tolist() == pack.media.places.tolist()
    assert pack.position_ids.shape == (3, len(pack.input_ids))
    [alone] = packs(pad_trajectories(pictures.group(5, [], 2), 0))
    assert alone.media is None
    assert alone.position_ids.ndim == 1


def test_media_after_the_last_trained_token_are_not_computed():
    sample = pictures.trajectory(1, [ONE], later=[WIDE])
    end = sample.prompt_length + 2
    first = replace(sample, loss_mask=tuple(each if place < end else 0 for place, each in enumerate(sample.loss_mask)))
    [pack] = packs(pad_trajectories([first], 0))
    assert [each.digest for each in pack.media.contents] == [ONE.digest]
    assert pack.input_ids.tolist() == list(sample.tokens[: end - 1])


@pytest.mark.parametrize(
    ("name", "share_prompts", "max_tokens"),
    [
        ("tiny:qwen2_5_vl", True, 10_000),
        pytest.param("tiny:qwen2_5_vl", False, 80, marks=pytest.mark.slow),
        ("tiny:qwen3_vl", True, 120),
        pytest.param("tiny:smolvlm", True, 200, marks=pytest.mark.slow),
        pytest.param("tiny:idefics3", False, 200, marks=pytest.mark.slow),
    ],
)
def test_packed_logprobs_and_gradients_are_those_of_transformers(name, share_prompts, max_tokens):
    samples = rows(name)
    if "qwen" in name:
        samples += pictures.group(6, [VIDEO], 2, name=name)
    data = pad_trajectories(samples, 0)
    mask = data.batch["response_mask"]
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    single, packed = pictures.model(name), pictures.model(name)
    expected = pictures.plain_logprobs(samples, mask.shape[1], single, name)
    (expected * weights).sum().backward()
    module = PolicyModule(packed, 1.0, pictures.processor(name))
    actual = torch.zeros_like(mask)
    for pack in packs(data, max_tokens, share_prompts=share_prompts):
        values = pack.padded(module(pack)["logprobs"])
        (values * weights[pack.rows]).sum().backward()
        actual[pack.rows] = values.detach()
    torch.testing.assert_close(actual, expected.detach(), atol=1e-4, rtol=1e-4)
    for (key, ours), theirs in zip(packed.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-3, msg=key)
    of_tower = [each.grad.abs().max() for part in vision_modules(packed) for each in part.parameters()]
    assert min(of_tower) > 0


def test_a_row_that_is_too_long_names_its_image_tokens():
    with pytest.raises(DataError, match=r"row 0 of the batch has \d+ tokens \(8 of them of images or videos\), over"):
        check_lengths(read_rows(pad_trajectories(pictures.group(1, [WIDE], 1), 0)), 10, "learner.a_budget")


def test_pictures_are_read_once_and_before_their_pass():
    made = pictures.processor()
    processor = VisionProcessor(made.tokenizer, made.family)
    read: list[str] = []
    original = processor.inputs
    processor.inputs = lambda content: (read.append(content.digest), original(content))[1]
    passes = packs(pad_trajectories(rows(), 0), 40, share_prompts=False)
    assert len(passes) > 2
    ahead = PicturesAhead(processor)
    for pack, following in zip(passes, [*passes[1:], None], strict=True):
        ahead.read(pack, following)
        wanted = {each.digest for each in pack.media.contents} if pack.media is not None else set()
        assert wanted <= set(read)
    ahead.close()
    # Passes that follow each other need the same pictures, each of which was read for the first of them.
    assert sorted(read) == sorted({ONE.digest, TWO.digest, WIDE.digest})
