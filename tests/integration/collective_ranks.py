"""Run by ``test_collective_transfer.py``: two ranks with half of a model each, and two engines that take its weights.

    python tests/integration/collective_ranks.py FOLDER

Rank 0 writes what it has seen to ``FOLDER/outcomes.json``. With a second argument, a learner of one rank that is killed
in the middle of an update of the server at that address.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import one_gpu
import torch
from engine.adapters import Adapted
from ports import free_port

from headwater.backends.launch.child import ChildServer, Command
from headwater.backends.native.engine import NativeEngine
from headwater.backends.native.places import ForeignServer, OwnServer, engine_arguments
from headwater.backends.router.engine import RoutedServer, RouterEngine
from headwater.cluster import torchrun
from headwater.config.load import load_config
from headwater.config.schema import Config, EngineConfig, WeightLink
from headwater.core.errors import LeftOut
from headwater.core.parcels import Content, Parcel
from headwater.learner.build import LearnerSpec, build_learner
from headwater.learner.held import held_by
from headwater.models.load import load_model
from headwater.observe.spans import Spans
from headwater.weights import collective, pieces
from headwater.weights.memory import in_buckets
from headwater.weights.publish import AdaptersAlone, StreamChecksums, publish

MODEL = "tiny:qwen3"
ENGINE = EngineConfig(kv_cache_gib=0.02, max_prefill_tokens=64, decode_steps=4)
SETTINGS = ("warm_start.num_steps=0", "trainer.num_prompts_per_step=4", "eval.every_steps=0", f"model.path={MODEL}")
SMALL_BUCKETS = 2**18
"""About a dozen buckets."""
LIMIT_S = 20.0
"""Of one bucket, for the case of an engine that stops: much longer than a busy machine lets the others wait."""
BUILD_LIMIT_S = 600.0


class OneRank:
    """As much of a learner of one rank as publishing through ``collective`` needs."""

    def __init__(self, seed: int) -> None:
        self.model = load_model(MODEL, dtype="float32", device="cpu", seed=seed)
        self.connected: Any = None
        self._sender = pieces.PieceSender(0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(each.shape) for name, each in self.model.named_parameters()}

    def export(self) -> Iterator[Any]:
        return in_buckets((name, each.detach()) for name, each in self.model.named_parameters())

    def parcels(self, content: Content = "merged") -> list[Parcel]:
        return [Parcel.whole(name, shape) for name, shape in self.shapes().items()]

    def connect(self, order: Any) -> list[Any]:
        report = self._sender.connect(order)
        self.connected = None if report.failure else order
        return [report]

    def broadcast(self, order: Any, content: Content = "merged") -> list[Any]:
        report = self._sender.send(order, self.parcels(), (each.detach() for each in self.model.parameters()))
        self.connected = None if report.failure else order
        return [report]


def engine(place: Any, encoding: Any = "plain") -> NativeEngine:
    link: WeightLink = "nccl" if one_gpu.is_shared() else "gloo"
    return NativeEngine(place, transfer="collective", link=link, encoding=encoding, spans=Spans(), hands_over=True)


def own(name: str, encoding: Any = "plain", settings: EngineConfig = ENGINE) -> NativeEngine:
    async def start(command: Command) -> ChildServer:
        return await ChildServer.start(
            replace(command, environment={**command.environment, **one_gpu.as_machine(name)})
        )

    arguments = engine_arguments(settings, shares_device=True)
    return engine(OwnServer(MODEL, arguments, "float32", start_child=start), encoding)


@contextmanager
def in_the_middle(action: Callable[[], None]) -> Iterator[None]:
    """Do something when this rank has sent its third bucket."""
    post, count = pieces.PieceSender._post, [0]

    def act_then_post(self: Any, *arguments: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            action()
        return post(self, *arguments)

    pieces.PieceSender._post = act_then_post
    try:
        yield
    finally:
        pieces.PieceSender._post = post


def exported_checksums(learner: Any, *, beside: bool = False) -> list[str]:
    """Of all weights, with adapters merged or ``beside`` them."""
    checksums = StreamChecksums(torch.float32)
    for _ in checksums.watch(learner.export_unmerged(False) if beside else learner.export()):
        pass
    return list(checksums.texts())


def sent(
    learner: Any, router: Any, engines: list[NativeEngine], version: int, adapters: AdaptersAlone | None = None
) -> dict[str, Any]:
    started = time.monotonic()
    published = publish(learner, router, version, adapters=adapters)
    seconds = time.monotonic() - started
    exported = exported_checksums(learner, beside=adapters is not None)
    return {
        "is_exported": exported == [published.serving, published.trained],
        "is_served": [each.weights_checksum() == published.serving for each in engines],
        "versions": [each.get_version() for each in engines],
        "checksum": published.serving,
        "num_bytes": published.num_bytes,
        "has_pause": bool(published.pause_s),
        "seconds": seconds,
    }


def outcomes(group: torchrun.TorchrunGroup) -> dict[str, Any]:
    config = load_config("quickstart", [*SETTINGS]).config
    learner = group.build(build_learner, LearnerSpec(config, MODEL, MODEL), timeout_s=BUILD_LIMIT_S)
    seen: dict[str, Any] = {}
    engines = [own("engine-a"), own("engine-b")]
    router = RouterEngine([RoutedServer(name, each) for name, each in zip("ab", engines, strict=True)])
    with closing(router):
        seen["parts"] = [len({*each.starts}) for each in learner.parcels()]
        seen["first"] = sent(learner, router, engines, 1)
        joined = learner.connected
        seen["second"] = sent(learner, router, engines, 2)
        seen["is_reused"] = learner.connected == joined
        collective.BUCKET_BYTES = SMALL_BUCKETS
        learner.connected = None
        with in_the_middle(lambda: os.kill(engines[1].pid, signal.SIGKILL)):
            started = time.monotonic()
            published = publish(learner, router, 3)
            seen["killed"] = {
                "seconds": time.monotonic() - started,
                "is_served": engines[0].weights_checksum() == published.serving,
                "version": router.get_version(),
            }
        seen["replaced"] = _until_served(learner, router, engines)
        usual = collective.LIMIT_S, collective._GIVE_UP_S
        collective.LIMIT_S, collective._GIVE_UP_S = LIMIT_S, LIMIT_S
        learner.connected = None
        stopped = engines[1].pid
        with in_the_middle(lambda: os.kill(stopped, signal.SIGSTOP)):
            started = time.monotonic()
            published = publish(learner, router, 4)
            seen["stopped"] = {
                "seconds": time.monotonic() - started,
                "is_served": engines[0].weights_checksum() == published.serving,
                "states": [each.state for each in router.status().servers],
            }
        collective.LIMIT_S, collective._GIVE_UP_S = usual
        os.kill(stopped, signal.SIGCONT)
        seen["continued"] = _until_served(learner, router, engines)
    adapted = load_config("quickstart", [*SETTINGS, "lora.rank=4"]).config
    learner = group.build(build_learner, LearnerSpec(adapted, MODEL, MODEL), timeout_s=BUILD_LIMIT_S)
    alone = own("engine-c", "delta")
    with closing(alone):
        seen["adapters, delta"] = [sent(learner, alone, [alone], version) for version in (1, 2)]
    seen["adapters alone"] = adapters_alone(group, adapted)
    return seen


def build_drawing(spec: LearnerSpec) -> Any:
    """A rank's learner whose adapters can be given new values, as an update would."""
    learner = build_learner(spec)
    named = list(learner.actor.engine.module.model.named_parameters())

    @torch.no_grad()
    def draw(seed: int) -> None:
        torch.manual_seed(seed)
        for _, each in named:
            if each.requires_grad:
                held_by(each).normal_(std=0.1)

    learner.draw = draw  # type: ignore[attr-defined]
    return learner


def adapters_alone(group: torchrun.TorchrunGroup, config: Config) -> dict[str, Any]:
    learner = group.build(build_drawing, LearnerSpec(config, MODEL, MODEL), timeout_s=BUILD_LIMIT_S)
    engines = [own(name, settings=replace(ENGINE, adapter_rank=4)) for name in ("engine-d", "engine-e")]
    router = RouterEngine([RoutedServer(name, each) for name, each in zip("de", engines, strict=True)])
    adapters, seen = AdaptersAlone(), {}

    def draw(version: int) -> None:
        learner._ranks.call("draw", [(version,)] * learner._ranks.num_ranks)

    with closing(router):
        for version in (1, 2, 3):
            draw(version)
            seen[str(version)] = sent(learner, router, engines, version, adapters)
        collective.BUCKET_BYTES = 2**12  # a dozen buckets of adapters
        learner.connected = None
        draw(4)
        with in_the_middle(lambda: os.kill(engines[1].pid, signal.SIGKILL)):
            published = publish(learner, router, 4, adapters=adapters)
        seen["killed"] = {"is_served": engines[0].weights_checksum() == published.serving}
        seen["replaced"] = _until_served(learner, router, engines, adapters)
        draw(5)
        seen["5"] = sent(learner, router, engines, 5, adapters)
        alone, engine = AdaptersAlone(), engines[0]
        policy = Adapted("float32", "cpu")  # no ranks, so its stream is sent
        for version in (6, 7):
            policy.train(version)
            published = publish(policy, engine, version, adapters=alone)
            is_served = engine.weights_checksum() == published.serving
            seen[f"streamed {version}"] = {"is_served": is_served, "num_bytes": published.num_bytes}
    return seen


def _until_served(
    learner: Any, router: RouterEngine, engines: list[NativeEngine], adapters: AdaptersAlone | None = None
) -> dict[str, Any]:
    """Publish again, as a run does, until both engines have the newest weights."""
    deadline = time.monotonic() + BUILD_LIMIT_S
    while time.monotonic() < deadline:
        if router.status().needs_weights:
            with suppress(LeftOut):  # it may end or be silent again while it starts, and is sent the weights again
                publish(learner, router, router.get_version(), is_repeat=True, adapters=adapters)
        served = [each.status().version for each in engines]
        is_served = served[0] == served[1] and not any(each.status().needs_weights for each in engines)
        if is_served and all(each.state == "serving" for each in router.status().servers):
            break
        time.sleep(0.2)
    texts = {each.weights_checksum() for each in engines}
    return {"versions": served, "num_checksums": len(texts)}


def run(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **one_gpu.of_rank(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    group = torchrun.join()
    with closing(group):
        if rank:
            group.serve()
            return
        (folder / "outcomes.json").write_text(json.dumps(outcomes(group)))


def be_killed(url: str) -> None:
    collective.BUCKET_BYTES = SMALL_BUCKETS
    with in_the_middle(lambda: os.kill(os.getpid(), signal.SIGKILL)):
        publish(OneRank(1), engine(ForeignServer(url)), 7)


def main(folder: Path) -> None:
    port = free_port()
    pid = os.fork()
    try:
        run(0 if pid else 1, port, folder)
    finally:
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    if sys.argv[2:]:
        be_killed(sys.argv[2])
    else:
        main(Path(sys.argv[1]))
