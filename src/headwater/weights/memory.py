"""Weights for an engine in this process: copied into its parameters bucket by bucket.

receiver = Receiver(model, update.shapes)        # WeightsError if names or shapes do not fit; nothing has changed
receiver.take_all(update)                        # WeightsIncomplete if the stream fails after a weight was changed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.core.errors import WeightsError, WeightsIncomplete
from headwater.core.protocols import Bucket, WeightUpdate

BUCKET_BYTES = 256 * 2**20
"""Default size limit of a bucket. A larger tensor is a bucket alone."""
_NUM_SHOWN = 5


def in_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Group tensors into buckets as they come; at most one bucket is held at a time."""
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors:
        if bucket and num_bytes + tensor.nbytes > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def as_announced(
    buckets: Iterable[Bucket], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, *, kept: str = ""
) -> Iterator[Bucket]:
    """The buckets of a stream, whose tensors are checked on the device that holds them before they are sent.

    ``WeightsError`` for a tensor that is missing, unknown, of another shape, or not finite as ``dtype``. ``kept`` is
    added to the message if the receiver has changed nothing until the stream is complete.
    """
    missing = set(shapes)
    for bucket in buckets:
        if problems := no_weights(bucket) or not_finite(bucket, dtype):
            raise WeightsError(f"weight update refused{kept}: {problems[0]}")
        for name, tensor in bucket:
            if name not in missing or tuple(tensor.shape) != tuple(shapes[name]):
                raise WeightsError(f"{name} of shape {tuple(tensor.shape)}: was not announced, or came twice")
            missing.remove(name)
        yield bucket
    if missing:
        raise WeightsError(f"{len(missing)} tensors did not arrive, for example {min(missing)}")


class Receiver:
    """Copies one weight update into a model's parameters, which keep their addresses.

    Tied weights may be sent under any of their names.
    """

    def __init__(self, model: Any, shapes: Mapping[str, tuple[int, ...]], *, adapters_alone: bool = False) -> None:
        """With ``adapters_alone``, all adapters of the model are expected, and nothing else."""
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        adapters = {name: each for name, each in parameters.items() if name.endswith((".lora_A", ".lora_B"))}
        if adapters_alone and not adapters:
            raise WeightsError("weight update refused: the engine has no adapters; start it with engine.adapter_rank")
        self._targets = adapters if adapters_alone else parameters
        self._names = {name: name for name in self._targets}
        if not adapters_alone:
            self._names |= _tied_names(model, parameters)
        """The parameter behind every name that a tensor may have."""
        self._shapes = shapes
        self._seen: set[str] = set()
        self._written: set[str] = set()
        self._refuse(self._misfits(shapes))

    def take_all(self, update: WeightUpdate) -> None:
        """Copy every bucket of the stream, or raise.

        An error before the first copy leaves the old weights in place. After it the model holds a mixture of two
        versions, and the error is ``WeightsIncomplete``. Values are checked once, after the last copy: waiting for the
        device after every bucket would lengthen the pause of the engine.
        """
        buckets = iter(update.buckets)
        try:
            while (bucket := _next_of(buckets)) is not None:
                self.check(bucket)
                self._copy(bucket)
            self._refuse([f"{name} did not arrive" for name in self._shapes if name not in self._seen])
            self._refuse(not_finite(list(self._targets.items())))
        except WeightsError as error:
            if not self._written:
                raise
            raise WeightsIncomplete(
                f"the update to version {update.version} failed after {len(self._written)} of {len(self._targets)} "
                f"tensors; the engine generates nothing until a complete update succeeds: {error}"
            ) from error
        finally:
            update.close()

    def check(self, bucket: Bucket) -> None:
        """Raise ``WeightsError`` for a bucket that must not be copied. Changes no weight."""
        problems: list[str] = []
        for name, tensor in bucket:
            if name in self._seen:
                problems.append(f"{name} is given twice")
            elif name not in self._shapes:
                problems.append(f"{name} was not announced")
            elif tuple(tensor.shape) != tuple(self._shapes[name]):
                problems.append(f"{name} has shape {tuple(tensor.shape)}, announced {tuple(self._shapes[name])}")
            self._seen.add(name)
        self._refuse(problems or no_weights(bucket) or self._contradictions(bucket))

    @torch.no_grad()
    def _copy(self, bucket: Bucket) -> None:
        self._written.update(self._names[name] for name, _ in bucket)
        if bucket:
            targets = [self._targets[self._names[name]] for name, _ in bucket]
            sources = [_on_device(tensor, target) for (_, tensor), target in zip(bucket, targets, strict=True)]
            # Copies from pinned memory are queued one after the other, and the device is waited for once.
            torch._foreach_copy_(targets, sources, non_blocking=True)
            if targets[0].device.type == "cuda" and any(tensor.device.type == "cpu" for _, tensor in bucket):
                torch.cuda.current_stream(targets[0].device).synchronize()  # the sender may overwrite the bucket now

    def _misfits(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        given = {self._names.get(name, name) for name in shapes}
        problems = [f"missing {name}" for name in sorted(self._targets.keys() - given)]
        problems += [f"unknown {name}" for name in sorted(shapes.keys() - self._names.keys())]
        expected = {name: tuple(self._targets[self._names[name]].shape) for name in shapes if name in self._names}
        problems += [
            f"{name} has shape {tuple(shapes[name])}, expected {shape}"
            for name, shape in expected.items()
            if tuple(shapes[name]) != shape
        ]
        return problems

    @torch.no_grad()
    def _contradictions(self, bucket: Bucket) -> list[str]:
        """Tied tensors that were sent under two names with different values."""
        problems: list[str] = []
        first: dict[str, Tensor] = {}
        for name, tensor in bucket:
            target = self._names[name]
            if target in first or target in self._written:
                known = first.get(target, self._targets[target])
                if not torch.equal(tensor.to(known), known):
                    problems.append(f"{name} differs from {target}, which is the same parameter")
            first[target] = tensor
        return problems

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            more = f"; and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
            kept = "" if self._written else ", the old weights stay in place"
            raise WeightsError(f"weight update refused{kept}: {'; '.join(problems[:_NUM_SHOWN])}{more}")


def _on_device(tensor: Tensor, target: Tensor) -> Tensor:
    """A tensor that a copy to ``target`` does not convert on the CPU, which is many times slower than on a GPU."""
    if tensor.dtype != target.dtype and tensor.device.type == "cpu" and target.device.type == "cuda":
        return tensor.to(target.device, non_blocking=True)
    return tensor


def no_weights(bucket: Bucket) -> list[str]:
    """Which tensors cannot be weights, whatever their values are."""
    problems = []
    for name, tensor in bucket:
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            problems.append(f"{name} is not a tensor with values in memory")
        elif not tensor.is_floating_point():
            problems.append(f"{name} is {tensor.dtype}")
    return problems


@torch.no_grad()
def not_finite(bucket: Bucket, dtype: torch.dtype | None = None) -> list[str]:
    """Which tensors hold values that are NaN or infinite, as they are or as ``dtype``. A model would generate noise."""
    if not bucket:
        return []
    tensors = [tensor for _, tensor in bucket]
    if tensors[0].device.type == "cuda":
        # Reduced together, so that the device is waited for once.
        norms = torch._foreach_norm(tensors, ord=torch.inf)
        is_uniform = len({each.dtype for each in norms}) == 1
        largest = torch.stack(norms if is_uniform else [each.float() for each in norms])
    else:
        largest = torch.stack([_largest(each) for each in tensors])
    is_finite = largest.to(dtype or largest.dtype).isfinite().tolist()
    return [
        f"{name} holds values that are NaN or infinite as {dtype or tensor.dtype}"
        for (name, tensor), finite in zip(bucket, is_finite, strict=True)
        if not finite
    ]


def _largest(tensor: Tensor) -> Tensor:
    """The largest absolute value, or NaN. On a CPU this is several times faster than a norm."""
    if not tensor.numel():
        return torch.zeros(())
    low, high = torch.aminmax(tensor)
    return torch.maximum(low.abs(), high.abs()).float()


def _next_of(buckets: Iterator[Bucket]) -> Bucket | None:
    """The next bucket, or ``None`` at the end. An error of the sender becomes a ``WeightsError``."""
    try:
        return next(buckets, None)
    except WeightsError:
        raise
    except Exception as error:
        raise WeightsError(f"reading the new weights failed: {type(error).__name__}: {error}") from error


def _tied_names(model: Any, targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that ``named_parameters`` leaves out because they are the same tensor as another one."""
    everything = dict(model.named_parameters(remove_duplicate=False))
    by_identity = {id(tensor): name for name, tensor in targets.items()}
    return {name: by_identity[id(tensor)] for name, tensor in everything.items() if name not in targets}
