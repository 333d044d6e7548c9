"""``headwater export``: write the model of a run as a folder that transformers and vLLM load, with a model card."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import HeadwaterError
from headwater.core.registry import PYTHON

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.config.schema import Config
    from headwater.observe.run_directory import RunDirectory

HELP = (
    "Write the model of a run into a new folder in the Hugging Face format, with a model card. Adapters of a LoRA run "
    "are merged into the model, or written alone with --adapter."
)
EXAMPLES = """\
examples:
  headwater export runs/mine --to models/mine                          the latest checkpoint
  headwater export runs/mine --step best --to models/mine              the one with the best evaluation
  headwater export runs/mine --to models/mine --dtype bfloat16         half the size
  headwater export runs/lora --to adapters/mine --adapter              only the adapters, for peft"""

_SHOWN_METRICS = ("reward/mean", "response_length/mean", "stopped_fraction", "num_prompts", "num_samples")
_LORA_A, _LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "headwater export RUN --to FOLDER [--step N|best] [--merge | --adapter] [--dtype TYPE] [--license ID]"
    )
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="run directory, or the URL of its copy (trainer.checkpoint_dir)")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="new folder that is written")
    parser.add_argument(
        "--step",
        default="",
        metavar="N|best",
        help="checkpoint to export; best is the one with the best trainer.best_metric, or eval/reward/mean if that is "
        "empty; default the latest",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--merge", action="store_true", help="merge adapters into the model; this is the default")
    form.add_argument("--adapter", action="store_true", help="write only the adapters of a LoRA run, in peft's format")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="number type of the weights; default that of the checkpoint",
    )
    parser.add_argument(
        "--license",
        "--licence",
        default="other",
        metavar="ID",
        help="license in the model card, such as apache-2.0; default other",
    )


def run(args: argparse.Namespace) -> int:
    from headwater.config.load import load_config
    from headwater.core.disk import disk_full
    from headwater.observe.progress import Display
    from headwater.observe.run_directory import RunDirectory
    from headwater.trainer.checkpoint import check_whole, find_checkpoint, step_of
    from headwater.trainer.mirror import local_run

    directory = RunDirectory.open(local_run(args.run, key="RUN", step=args.step))
    config = load_config(directory.config_file, was_accepted=True).config
    checkpoint = find_checkpoint(directory, config.trainer, args.step)
    check_whole(directory, checkpoint, part="train" if args.adapter else "model")
    if args.adapter and not config.lora.rank:
        raise HeadwaterError(f"--adapter: {args.run} trained all weights (lora.rank = 0); remove this option")
    target = args.to.expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise HeadwaterError(f"--to {target}: exists and is not empty; name a new folder")
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.partial"
    try:
        temporary.mkdir(parents=True)
        if args.adapter:
            _write_adapter(checkpoint, config, temporary, args.dtype)
        else:
            _write_model(checkpoint / "model", temporary, args.dtype)
        card = model_card(directory, config, step_of(checkpoint), is_adapter=args.adapter, licence=args.license)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        os.rename(temporary, target)
    except OSError as error:
        if (full := disk_full(error, target, "the exported model")) is not None:
            raise full from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    what = "The adapters" if args.adapter else "The model"
    Display().say(f"{what} of step {step_of(checkpoint)}: {target}")
    return 0


def _write_model(source: Path, target: Path, dtype: str | None) -> None:
    for file in sorted(source.rglob("*")):
        place = target / file.relative_to(source)
        if file.is_dir():
            place.mkdir(exist_ok=True)
        elif dtype is not None and file.suffix == ".safetensors":
            _convert(file, place, dtype)
        else:
            shutil.copy2(file, place)
    if dtype is not None:
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        (target / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")
        if (index := target / "model.safetensors.index.json").exists():
            content = json.loads(index.read_text(encoding="utf-8"))
            sizes = (file.stat().st_size for file in target.glob("*.safetensors"))
            content["metadata"] = {**content.get("metadata", {}), "total_size": sum(sizes)}
            index.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _convert(source: Path, target: Path, dtype: str) -> None:
    """One tensor at a time, so that no second copy of the model is in memory."""
    import torch
    from safetensors import safe_open

    from headwater.models.save import write_safetensors

    with safe_open(source, framework="pt") as opened:
        names = list(opened.keys())
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        write_safetensors(
            target,
            shapes,
            dict.fromkeys(names, getattr(torch, dtype)),
            ((name, opened.get_tensor(name)) for name in names),
        )


def _write_adapter(checkpoint: Path, config: Config, target: Path, dtype: str | None) -> None:
    import torch

    from headwater.models.load import load_tokenizer
    from headwater.models.save import write_safetensors

    tensors = dict(_adapter_weights(checkpoint))
    chosen = {name: getattr(torch, dtype) if dtype else each.dtype for name, each in tensors.items()}
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    write_safetensors(target / "adapter_model.safetensors", shapes, chosen, tensors.items())
    paths = {name.rpartition(".lora_")[0].removeprefix("base_model.model.") for name in tensors}
    # In a vision model, layers of the tower have the same names, so peft needs whole paths.
    has_tower = "vision_config" in json.loads((checkpoint / "model" / "config.json").read_text(encoding="utf-8"))
    layers = sorted(paths if has_tower else {path.rpartition(".")[2] for path in paths})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter_base(config.model.path),
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": layers,
        "bias": "none",
        "inference_mode": True,
    }
    (target / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    load_tokenizer(str(checkpoint / "model")).save_pretrained(target)


def adapter_base(model_path: str) -> str:
    """What peft loads as the model below the adapters: a hub id or a folder.

    That of ``smollm2`` is the folder with the weights that were trained on. The ones on the hub differ a little.
    """
    from headwater.models.builtin.smollm2 import smollm2_folder
    from headwater.models.source import resolve_model

    return str(smollm2_folder()) if resolve_model(model_path).kind == "smollm2" else model_path


def _adapter_weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    from headwater.learner.sharded_checkpoint import read_weights

    for name, tensor in read_weights(checkpoint, ".lora_"):
        for end in (_LORA_A, _LORA_B):
            if name.endswith(end):
                short = end.replace(".default", "")
                yield f"base_model.model.{name.removesuffix(end)}{short}", tensor


def model_card(run: RunDirectory, config: Config, step: int, *, is_adapter: bool, licence: str) -> str:
    """The README.md of the exported folder: recipe, steps, metrics, base model and licence."""
    import headwater
    from headwater.config.explain import changed_settings
    from headwater.models.builtin.smollm2 import HUB_ID
    from headwater.models.source import resolve_model

    records = run.read_metrics()
    kind = resolve_model(config.model.path).kind
    is_folder = kind == "folder"
    base = Path(config.model.path).name if is_folder else HUB_ID if kind == "smollm2" else config.model.path
    quantised = " (with the quantised weights of `headwater fetch smollm2`)" if kind == "smollm2" else ""
    tags = ["headwater", "reinforcement-learning", config.algorithm.advantage]
    front = {
        **({} if is_folder else {"base_model": base}),
        **({"base_model_relation": "adapter"} if is_adapter else {}),
        "library_name": "peft" if is_adapter else "transformers",
        "license": licence,
        "pipeline_tag": "image-text-to-text" if _reads_images(run.checkpoint(step)) else "text-generation",
        "tags": [tag for tag in tags if "/" not in tag and ":" not in tag],
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {run.path.name}", ""]
    what = "LoRA adapters for" if is_adapter else "A model based on"
    lines += [
        f"{what} `{base}`{quantised}, trained with reinforcement learning by Headwater {headwater.__version__}: "
        f"step {step} of {config.trainer.total_steps}, {config.trainer.num_prompts_per_step} prompts with "
        f"{config.rollout.num_samples_per_prompt} responses in each step, advantage `{config.algorithm.advantage}`, "
        f"loss `{config.algorithm.policy_loss}`, data `{', '.join(map(_source_name, config.data.train))}`.",
        "",
        "## Evaluation",
        "",
        *_metrics_table([each for each in records if each["kind"] == "eval" and each["step"] <= step]),
        "",
        "## Recipe",
        "",
        "The settings that differ from the defaults:",
        "",
        "```yaml",
        changed_settings(config, leave_out=["run"]).rstrip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _reads_images(checkpoint: Path) -> bool:
    return "vision_config" in json.loads((checkpoint / "model" / "config.json").read_text(encoding="utf-8"))


def _source_name(source: str) -> str:
    """A task as it is; of a file, only its name. Rows of a Python program have none."""
    if source.startswith(PYTHON):
        return "rows from Python"
    return source.rpartition("/")[2] if source.startswith("/") else source


def _metrics_table(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    if not evaluations:
        return ["The run was not evaluated."]
    shown = [evaluations[0], *evaluations[1:][-1:]]
    extra = sorted({name for each in shown for name in each if "@" in name and name.count("/") == 1})
    rows = [name for name in (*_SHOWN_METRICS, *extra) if any(name in each for each in shown)]
    return [
        "| metric | " + " | ".join(f"step {each['step']}" for each in shown) + " |",
        "|---|" + "---|" * len(shown),
        *(f"| {name} | " + " | ".join(_number(each.get(name)) for each in shown) + " |" for name in rows),
    ]


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else ""
