"""What ``test_torchrun.py`` runs on two ranks: the learner's calls in many settings.

    python tests/integration/two_ranks.py FOLDER CASE ...

It forks the two ranks, which is faster than torchrun. Rank 0 writes ``FOLDER/results.pt``. The test makes the same
calls on one rank, with ``take_steps`` and ``resume``.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import one_gpu
import pictures
import tiny
import torch
from ports import free_port
from torch.distributed.tensor import DTensor

from headwater.cluster.torchrun import join
from headwater.config.load import load_config
from headwater.core.data_proto import DataProto
from headwater.core.errors import HeadwaterError
from headwater.core.learner import MEASURES_ITSELF, Learner, Role
from headwater.core.records import Trajectory
from headwater.learner.build import LearnerSpec, build_learner
from headwater.learner.engine import TrainEngine
from headwater.learner.held import held_by
from headwater.learner.learner import LocalLearner
from headwater.learner.partition import balanced_parts
from headwater.models.load import load_model, load_tokenizer, save_model
from headwater.rollout.group import pad_trajectories

RECIPE = "quickstart"
COMMON = (
    "model.dtype=float32",  # on a GPU, "auto" is bfloat16
    "warm_start.num_steps=0", "learner.learning_rate=1e-3", "learner.skip_zero_advantages=false",
    "learner.num_warmup_steps=0", "rollout.max_new_tokens=8", "data.max_prompt_tokens=8", "rollout.temperature=1.0",
)  # fmt: skip
KL = "algorithm.kl_in_loss=0.1"
WITH_CRITIC = ("critic.enabled=true", "algorithm.advantage=gae", "critic.learning_rate=1e-3")
_RECOMPUTES = ("algorithm.policy_loss=decoupled", "algorithm.old_logprobs=recompute")
"""The learner gets no old log-probs."""
SMALL_PACKS = "learner.max_tokens_per_microbatch=16"


@dataclass(frozen=True)
class Case:
    settings: tuple[str, ...] = ()
    num_rows: int = 12
    silent: str = ""
    """Which rows have no advantage: those of the "second rank", or "most"."""
    what: tuple[str, ...] = ("logprobs",)
    is_built: bool = False
    """A model that is built rather than read from files."""
    has_pictures: bool = False
    """A vision model. Only some of the rows have pictures, so the ranks have different numbers of them."""
    vision_model: str = pictures.NAME
    """The model of a case with pictures."""


CASES = {
    "plain": Case(),
    "built": Case(("algorithm.kl_in_loss=0.1",), what=("logprobs", "reference_logprobs"), is_built=True),
    "adapters": Case(("lora.rank=4", KL), what=("logprobs", "reference_logprobs")),
    "critic and reference": Case((*WITH_CRITIC, KL), what=("logprobs", "reference_logprobs", "values")),
    "checkpointed, by sequence": Case(
        ("learner.checkpoint_activations=true", "algorithm.aggregation=seq-mean-token-mean")
    ),
    "critic in uneven mini-batches": Case(
        (*WITH_CRITIC, SMALL_PACKS, "learner.num_minibatches=2", "learner.num_epochs=2"), 5, what=("values",)
    ),
    "more mini-batches than rows": Case(("learner.num_minibatches=4",), 2),
    "fewer rows than ranks": Case((), 1),
    "nothing to learn on one rank": Case(("learner.skip_zero_advantages=true",), silent="second rank"),
    "nothing to learn in mini-batches": Case(
        ("learner.skip_zero_advantages=true", "learner.num_minibatches=2"), silent="most"
    ),
    "measured by itself": Case((*_RECOMPUTES, "learner.num_minibatches=4"), 5),
    "measured by itself, in mini-batches without an advantage": Case(
        (*_RECOMPUTES, "learner.num_minibatches=4", "learner.skip_zero_advantages=true"), silent="most"
    ),
    "bfloat16": Case(("model.dtype=bfloat16",)),
    "adapters in bfloat16": Case(("lora.rank=4", "model.dtype=bfloat16")),
}
CASES |= {
    "pictures": Case(
        (SMALL_PACKS.replace("16", "30"), KL), 10, what=("logprobs", "reference_logprobs"), has_pictures=True
    ),
    "pictures in mini-batches": Case(
        ("learner.num_minibatches=4", "learner.checkpoint_activations=true", "learner.weight_decay=0.1"),
        8,
        is_built=True,
        has_pictures=True,
    ),
    "frozen tower": Case(("learner.freeze=[vision]", *WITH_CRITIC), 10, what=("logprobs", "values"), has_pictures=True),
    "adapters and pictures": Case(
        ("lora.rank=4", "lora.targets=[q_proj, visual.blocks.0.attn.qkv]", KL),
        10,
        what=("logprobs", "reference_logprobs"),
        has_pictures=True,
    ),
    "adapters outside of attention and pictures": Case(
        ("lora.rank=4", "lora.targets=[down_proj, visual.blocks.0.attn.qkv]", SMALL_PACKS.replace("16", "30")),
        10,
        has_pictures=True,
    ),
    "pictures in bfloat16": Case(("model.dtype=bfloat16",), 10, has_pictures=True),
    "pictures that add to the first layers": Case(
        ("learner.num_minibatches=2", KL),
        10,
        what=("logprobs", "reference_logprobs"),
        has_pictures=True,
        vision_model="tiny:qwen3_vl",
    ),
    "pictures in parts": Case(
        ("learner.num_minibatches=2", KL),
        10,
        what=("logprobs", "reference_logprobs"),
        has_pictures=True,
        vision_model="tiny:smolvlm",
    ),
}
FEW = ("adapters",)
"""Of the fast tests. A critic on two ranks is in the one of ``test_context_parallel.py``."""
RESUMED = ("plain", "adapters", "critic and reference", "pictures", "frozen tower")


def save_models(folder: Path, names: Iterable[str]) -> None:
    """What the cases begin with, unless it is built. All ranks read the same files, so none of them writes them."""
    model = load_model("tiny:qwen3", dtype="float32", device="cpu", seed=3)
    save_model(model, load_tokenizer("tiny:qwen3"), folder / "model")
    for name in names:
        if CASES[name].has_pictures:
            vision_model(CASES[name].vision_model, folder)


def vision_model(name: str, folder: Path) -> Path:
    """Where the model is saved, from now on."""
    target = folder / name.replace(":", "_")
    if not target.exists():
        processor = pictures.processor(name)
        save_model(pictures.model(name), processor.tokenizer, target, processor=processor)
    return target


def spec_of(case: Case, folder: Path) -> LearnerSpec:
    if case.has_pictures:
        model = case.vision_model if case.is_built else str(vision_model(case.vision_model, folder))
    else:
        model = "tiny:llama" if case.is_built else str(folder / "model")
    prompts = ("trainer.num_prompts_per_step=4", "eval.every_steps=0")
    config = load_config(RECIPE, [*COMMON, f"model.path={model}", *prompts, *case.settings]).config
    return LearnerSpec(config, model, model)


def rows_with_pictures(num_rows: int, name: str) -> list[Trajectory]:
    """A group with one picture, a group without, and a group that is shown a second picture later, and so on."""
    shown, later = [pictures.picture(1)], [pictures.picture(2, 112)]
    groups = [
        *pictures.group(1, shown, 4, name=name),
        *pictures.group(2, [], 3, name=name),
        *pictures.group(3, later, 3, later=shown, name=name),
    ]
    return groups[:num_rows]


def experience(case: Case) -> DataProto:
    if case.has_pictures:
        trajectories = rows_with_pictures(case.num_rows, case.vision_model)
    else:
        trajectories = [tiny.trajectory(100 + row, uid=f"row{row // 4}", sample=row) for row in range(case.num_rows)]
    data = pad_trajectories(trajectories, pad_token_id=0)
    mask = data.batch["response_mask"]
    advantages = torch.randn(case.num_rows, 1, generator=torch.Generator().manual_seed(0)) * mask
    if case.silent:
        advantages[balanced_parts(data, 2, num_minibatches=2 if case.silent == "most" else 1)[1]] = 0.0
    if case.silent == "most":  # none of the first mini-batch, and one rank's rows of the second
        advantages[: case.num_rows // 2] = 0.0
    returns = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    measures_itself = set(_RECOMPUTES) <= set(case.settings)
    old = {} if measures_itself else {"old_logprobs": data.batch["rollout_logprobs"]}
    return data.with_columns(
        tensors={
            **old,
            "advantages": advantages,
            "values": torch.zeros_like(returns),
            "returns": returns,
        },
        meta_info={"version": 0, MEASURES_ITSELF: measures_itself},
    )


def checksums(learner: Learner, case: Case) -> list[str]:
    return [learner.checksum(role) for role in roles_of(case)]


def roles_of(case: Case) -> tuple[Role, ...]:
    return ("policy", "critic") if "values" in case.what else ("policy",)


def exported(learner: Learner, case: Case) -> dict[str, torch.Tensor]:
    return {
        f"{role}.{name}": tensor.clone()
        for role in roles_of(case)
        for bucket in learner.export(role)
        for name, tensor in bucket
    }


def take_steps(
    learner: Learner, case: Case, folder: Path, ask: Callable[[str], list[Any]] | None = None
) -> dict[str, Any]:
    """Two steps, with passes without a gradient before them and a checkpoint between them, also in the background.

    ``ask`` calls a method of ``Observed`` on every rank.
    """
    ask = ask or (lambda method: [getattr(learner, method)()])
    ask("keep_gradients")
    data = experience(case)
    computed = learner.compute(data, case.what)
    if "reference_logprobs" in computed:
        data = data.with_columns(tensors={"reference_logprobs": computed["reference_logprobs"]})
    first = learner.update(data)
    after_one = learner.compute(data, case.what)
    learner.save(folder)
    saved = checksums(learner, case)
    later = later_than(folder)
    later.mkdir(parents=True)
    snapshot = learner.snapshot(later)
    assert snapshot is not None
    second = learner.update(data)
    snapshot.write()
    return {
        "computed": computed,
        "after_one": after_one,
        "stats": [first, second],
        "gradients": ask("kept_gradients")[0],
        "saved": saved,
        "weights": exported(learner, case),
        "status": learner.status(),
    }


def later_than(folder: Path) -> Path:
    """Where the same checkpoint is written while training continues."""
    return folder.with_name(f"{folder.name} later")


def resume(learner: Learner, case: Case, folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Continued from the checkpoint: the checksums of what it restores, and the weights after the second step."""
    data = experience(case)
    if "reference_logprobs" in case.what:
        data = data.with_columns(tensors=learner.compute(data, ["reference_logprobs"]))
    learner.load(folder)
    restored = checksums(learner, case)
    learner.update(data)
    return restored, exported(learner, case)


class Observed(LocalLearner):
    """A learner that also answers what its rank holds, and fails on request."""

    def held_bytes(self) -> dict[str, int]:
        """Bytes of the parameters that this rank holds, and of all parameters."""
        models = [each.module for each in self._engines()]
        parameters = [parameter for model in models for parameter in model.parameters()]
        return {
            "held": sum(held_by(each).nbytes for each in parameters),
            "all": sum(each.numel() * each.element_size() for each in parameters),
        }

    def keep_gradients(self) -> None:
        """Keep those of the first optimiser step of every role, before they are clipped. No rounding of AdamW is in
        them."""
        self.gradients: dict[str, torch.Tensor] = {}
        trained = {"policy": self.actor, **({"critic": self.critic} if self.critic is not None else {})}
        for role, trainer in trained.items():
            self._keep_gradients_of(role, trainer.engine)

    def _keep_gradients_of(self, role: str, engine: TrainEngine) -> None:
        clip = engine.optimizer.clip

        def keep() -> torch.Tensor:
            for name, parameter in engine.module.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad
                    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                    self.gradients[f"{role}.{name}"] = whole.clone()
            engine.optimizer.clip = clip  # type: ignore[method-assign]
            return clip()

        engine.optimizer.clip = keep  # type: ignore[method-assign]

    def kept_gradients(self) -> dict[str, torch.Tensor]:
        return self.gradients

    def fail_alone(self, rank: int) -> None:
        """Fail on one rank while the others wait for it."""
        ranks = self.actor.engine.ranks
        if ranks.index == rank:
            raise MemoryError("no room for the gradients")
        ranks.max(0)


def build(spec: LearnerSpec) -> Observed:
    learner = build_learner(spec)
    learner.__class__ = Observed
    return learner  # type: ignore[return-value]


def error_of(call: Any) -> str:
    try:
        call()
    except HeadwaterError as error:
        return str(error)
    return "no error"


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with closing(join()) as group:
        if group.rank:
            group.serve()
            return
        results: dict[str, Any] = {"taken": {}, "resumed": {}, "held": {}}

        def everywhere(method: str) -> list[Any]:
            return group.call(method, [()] * 2)

        for name in names:
            case = CASES[name]
            learner = group.build(build, spec_of(case, folder), timeout_s=300)
            results["held"][name] = group.call("held_bytes", [()] * 2)
            results["taken"][name] = take_steps(learner, case, folder / "of_two" / name, everywhere)
            if name in RESUMED and len(names) > len(FEW):  # the fast tests do not look at it
                learner = group.build(build, spec_of(case, folder), timeout_s=300)
                results["resumed"][name] = resume(learner, case, folder / "of_one" / name)
        spec = spec_of(Case(), folder)
        strict = replace(spec.config, learner=replace(spec.config.learner, max_tokens_per_forward_pass=4))
        learner = group.build(build, replace(spec, config=strict), timeout_s=300)
        results["too long"] = error_of(lambda: learner.compute(experience(Case(num_rows=4)), ["logprobs"]))
        blocked = folder / "blocked"
        (blocked / "train" / "shard_00001_of_00002.safetensors").mkdir(parents=True)
        results["cannot save"] = error_of(lambda: learner.save(blocked))
        blocked = folder / "blocked later"
        (blocked / "train" / "shard_00001_of_00002.safetensors").mkdir(parents=True)
        results["cannot save later"] = error_of(lambda: learner.snapshot(blocked).write())
        results["not shared"] = error_of(lambda: learner.snapshot(folder / "nowhere"))
        results["after an error"] = group.call("held_bytes", [()] * 2)
        results["alone"] = error_of(lambda: group.call("fail_alone", [(1,)] * 2))
        results["after a failure"] = error_of(lambda: group.call("held_bytes", [()] * 2))
        results["failure"] = learner.status().failure
        torch.save(results, folder / "results.pt")


def fork_ranks(work: Callable[[], None], num_ranks: int = 2) -> None:
    """Ranks without a launcher, forked from this process so that torch is imported only once."""
    count, port = str(num_ranks), str(free_port())
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pids = []
    for rank in range(num_ranks):
        if not (pid := os.fork()):
            os.environ |= {"RANK": str(rank), **one_gpu.of_rank(rank), **shared}
            run_and_exit(work)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def run_and_exit(work: Callable[[], None]) -> None:
    """Without waiting for threads that wait for a rank that has failed on purpose."""
    try:
        work()
    except BaseException:  # noqa: BLE001  a forked process must not return into the code of its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    fork_ranks(partial(main, Path(sys.argv[1]), sys.argv[2:]))
