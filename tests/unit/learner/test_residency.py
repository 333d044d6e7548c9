"""Weights that move between a device and main memory survive an interrupt at any moment. Here the device is a CPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from headwater.config.load import load_config
from headwater.core.errors import HeadwaterError
from headwater.learner.build import LearnerSpec, build_learner
from headwater.learner.optimizer import Residency

CPU = torch.device("cpu")


class NoEvent:
    def synchronize(self) -> None:
        pass


class OnCpu(Residency):
    """Frees and allocates memory of the CPU as it would that of a GPU, without streams."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._moves = True
        self.interrupt_at = ""

    def wait(self) -> None:
        pass

    def _synchronize(self) -> None:
        pass

    def _allocate(self, sizes):
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]

    @contextmanager
    def _on_stream(self):
        if self.interrupt_at == "copy":
            raise KeyboardInterrupt
        yield self

    def record_event(self) -> NoEvent:
        return NoEvent()


class Fragile:
    """A storage whose ``resize_`` is interrupted, or finds no memory."""

    def __init__(self, storage: torch.UntypedStorage, error: BaseException) -> None:
        self._storage, self._error = storage, error

    def resize_(self, size: int) -> None:
        raise self._error


def a_group() -> tuple[OnCpu, list[torch.Tensor], list[torch.Tensor]]:
    tensors = [torch.randn(8), torch.randn(3, 4)]
    return OnCpu(), tensors, [each.clone() for each in tensors]


def came_back(tensors, copies) -> bool:
    return all(torch.equal(one, other) for one, other in zip(tensors, copies, strict=True))


def test_they_leave_and_return():
    residency, tensors, copies = a_group()
    residency.release(tensors)
    assert residency.is_away
    assert not any(each.untyped_storage().nbytes() for each in tensors)
    residency.restore()
    assert not residency.is_away
    assert came_back(tensors, copies)


def test_an_interrupt_while_memory_is_released_is_repaired():
    residency, tensors, copies = a_group()
    residency.copy_out(tensors)
    whole = residency._storages
    residency._storages = [whole[0], Fragile(whole[1], KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        residency.release(tensors)
    residency._storages = whole
    assert residency.is_away, "one of them has no memory"
    residency.restore()
    assert came_back(tensors, copies)


def test_an_interrupt_before_the_values_are_copied_back_is_repaired():
    residency, tensors, copies = a_group()
    residency.release(tensors)
    residency.interrupt_at = "copy"
    with pytest.raises(KeyboardInterrupt):
        residency.restore()
    assert tensors[0].untyped_storage().nbytes(), "memory without values"
    tensors[0].zero_()
    assert residency.is_away
    residency.interrupt_at = ""
    residency.restore()
    assert came_back(tensors, copies)


def test_a_learner_in_main_memory_returns_before_it_is_saved_or_says_that_it_cannot(tmp_path):
    learner = build_learner(LearnerSpec(load_config(["quickstart"]).config, "tiny:qwen3", "tiny:qwen3"))
    engine = learner.actor.engine
    engine.residency = residency = OnCpu()
    engine.device = torch.device("cpu", 0)  # not the device that "main memory" means
    before = learner.checksum()
    learner.offload()
    assert engine.is_away
    whole = residency._storages
    residency._storages = [Fragile(whole[0], torch.OutOfMemoryError("no room")), *whole[1:]]
    for save in (lambda: learner.save(tmp_path / "a"), lambda: learner.snapshot(tmp_path / "a"), learner.export):
        with pytest.raises(HeadwaterError, match="its device has no room for it: no room"):
            save()
    residency._storages = whole
    learner.save(tmp_path / "saved")
    assert not engine.is_away
    assert learner.checksum() == before
    saved = build_learner(LearnerSpec(learner.config, str(tmp_path / "saved" / "model"), "tiny:qwen3"))
    assert saved.checksum() == before
