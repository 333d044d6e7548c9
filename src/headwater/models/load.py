"""Models and tokenizers by name: a folder, a hub id, ``tiny:<preset>`` or ``smollm2``.

    source = resolve_model("tiny:qwen3")
    tokenizer = load_tokenizer("tiny:qwen3")
    model = load_model("tiny:qwen3", dtype="float32", device="auto", seed=0)

A problem with the files raises ``ModelError``. Weights that the files do not contain are never initialised at random.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from headwater.core.disk import show_bytes
from headwater.core.errors import ModelError
from headwater.models import folder as folder_checks
from headwater.models.builtin import tiny_vision
from headwater.models.builtin.chat_template import set_template
from headwater.models.builtin.tiny import build_config, build_model, build_tokenizer, find_preset
from headwater.models.device import free_bytes, resolve_device, resolve_dtype
from headwater.models.folder import quiet
from headwater.models.save import save_model
from headwater.models.sharded_load import ShardReader, load_skeleton, matches, named_as_in
from headwater.models.source import ModelSource, locate, resolve_model
from headwater.models.vision.architecture import check_supported, is_vision
from headwater.models.vision.families import image_processor_class, image_processor_name, vision_family
from headwater.models.vision.files import (
    image_processor_type,
    read_legacy_template,
    read_processor_files,
    video_settings,
)
from headwater.models.vision.processor import VisionProcessor

__all__ = [
    "ModelSource",
    "check_files",
    "end_token_ids",
    "load_model",
    "load_part",
    "load_processor",
    "load_tokenizer",
    "resolve_device",
    "resolve_dtype",
    "resolve_model",
    "save_model",
]

logger = logging.getLogger(__name__)

_NUM_KEYS_SHOWN = 3


def load_tokenizer(path: str, *, key: str = "model.path", chat_template: str = "") -> Any:
    """The model's tokenizer, which pads on the left and has a pad token.

    ``chat_template`` (``model.chat_template``) names another chat template than the model's own.
    """
    source = resolve_model(path, key)
    tokenizer = build_tokenizer(path) if source.kind == "tiny" else _read_tokenizer(locate(source), key)
    if chat_template:
        set_template(tokenizer, chat_template)
    return tokenizer


_HOW_IT_WAS_READ = ("is_local", "local_files_only")
"""transformers notes this in the tokenizer and would save it: the files would depend on the folder they came from."""


def _read_tokenizer(location: Path | str, key: str) -> Any:
    if isinstance(location, Path):
        folder_checks.check_tokenizer(location, key)
    config = read_config(location, key)
    plain = isinstance(location, Path) and folder_checks.is_self_described(location)
    loader = PreTrainedTokenizerFast if plain else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(location, padding_side="left")
    except Exception as error:  # the tokenizers library raises plain Exception for a file it cannot use
        raise _cannot_read(location, "tokenizer", error, key) from error
    for name in _HOW_IT_WAS_READ:
        tokenizer.init_kwargs.pop(name, None)
    if is_vision(config) and (template := read_legacy_template(location)):
        tokenizer.chat_template = template
    if tokenizer.pad_token_id is None:
        # Padding is masked everywhere, so any token can fill it.
        tokenizer.pad_token = tokenizer.eos_token
    _check_vocabulary(location, tokenizer, config)
    return tokenizer


def check_files(path: str, key: str) -> None:
    """Check what can be checked of a model in a local folder without reading its weights."""
    source = resolve_model(path, key)
    location = locate(source) if source.kind != "tiny" else None
    if isinstance(location, Path):
        folder_checks.check_weights(location, key)


def load_model(path: str, *, dtype: str, device: str, seed: int, key: str = "model.path") -> Any:
    """A language model in eval mode. ``seed`` determines the weights of ``tiny:`` models; others do not use it.

    ``key`` is the setting that messages name.
    """
    target, number_type = resolve_device(device), resolve_dtype(dtype, device)
    source = resolve_model(path, key)
    if source.kind == "tiny":
        model = build_model(path, seed=seed)
        for parameter in model.parameters():
            # Not the buffers: from_pretrained, too, keeps the rotary frequencies in float32.
            parameter.data = parameter.data.to(number_type)
        model.config.dtype = number_type
    else:
        model = _load_pretrained(locate(source), number_type, key)
    free = free_bytes(target)
    try:
        return model.to(target)
    except torch.OutOfMemoryError as error:
        needed = sum(each.numel() * each.element_size() for each in model.parameters())
        raise ModelError(
            f"{path}: its weights need {show_bytes(needed)}, and {show_bytes(free)} are free on {target}; "
            "free some memory, or use another device"
        ) from error


def load_part(path: str, *, dtype: str, seed: int, key: str = "model.path") -> tuple[Any, ShardReader | None]:
    """A model for one of several ranks, and the files from which the rank reads its shard.

    Models that are built rather than read (``tiny:``), pickled weights, and files whose names differ from the model's
    are loaded in full on the CPU, without files.
    """
    source = resolve_model(path, key)
    if source.kind != "tiny":
        location = local_folder(source)
        auto_class = _auto_class(location, read_config(location, key), key)
        model, files = part_with(auto_class, location, resolve_dtype(dtype), key)
        if files is not None:
            _read_generation_config(model, location)
            return model, files
    return load_model(path, dtype=dtype, device="cpu", seed=seed, key=key), None


def part_with(auto_class: Any, location: Path, dtype: torch.dtype, key: str) -> tuple[Any, ShardReader | None]:
    """A skeleton and its files. Without files if they cannot be read in parts."""
    folder_checks.check_weights(location, key)
    files = ShardReader.of(location)
    if files is None:
        return None, None
    try:
        with quiet():
            model = load_skeleton(auto_class, read_config(location, key), dtype)
    except Exception as error:  # architectures raise arbitrary errors when a shape in config.json makes no sense
        raise _cannot_read(location, "config", error, key) from error
    files = named_as_in(model, files)
    if not matches(model, files):
        logger.warning("%s: its weights have other names than the model's; every rank loads all of them", location)
        return None, None
    return model, files


def local_folder(source: ModelSource) -> Path:
    """The folder that holds the model; a hub model is downloaded first."""
    location = locate(source)
    if isinstance(location, Path):
        return location
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(location, allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except Exception as error:  # the hub also raises exceptions that are not OSErrors
        raise _cannot_read(location, "weights", error, source.key) from error


def _read_generation_config(model: Any, location: Path) -> None:
    if (location / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(location)
    _repair_generation_config(model)


def load_processor(path: str, chat_template: str = "", *, key: str = "model.path") -> VisionProcessor | None:
    """What turns images and videos into tokens and model inputs, or ``None`` for a model that takes only text."""
    source = resolve_model(path, key)
    if source.kind == "smollm2":
        return None
    location = locate(source) if source.kind != "tiny" else path
    config = build_config(find_preset(path, key)) if source.kind == "tiny" else read_config(location, key)
    if not is_vision(config):
        return None
    check_supported(config, _config_name(location, key))
    if source.kind == "tiny":
        made = tiny_vision.build_image_processor(config.model_type)
        image_processor, files = made.image_processor, made.files
    else:
        image_processor, files = _read_image_processor(location, config.model_type, key)
    family = vision_family(config, image_processor, video_settings(files))
    tokenizer = load_tokenizer(path, key=key, chat_template=chat_template)
    if tokenizer.convert_tokens_to_ids(family.token("image")) != config.image_token_id:
        raise ModelError(
            f"{location}: {family.token('image')} is not token {config.image_token_id} (image_token_id in config.json) "
            "of the tokenizer; use the tokenizer the model was trained with"
        )
    return VisionProcessor(tokenizer, family, files)


def _read_image_processor(location: Path | str, model_type: str, key: str) -> tuple[Any, dict[str, str]]:
    try:
        files = read_processor_files(location)
        with quiet():
            made = image_processor_class(model_type).from_pretrained(location)
    except Exception as error:  # its settings can be wrong in arbitrary ways
        raise _cannot_read(location, "image processor", error, key) from error
    found, expected = image_processor_type(files), image_processor_name(model_type)
    if found not in ("", expected):
        raise ModelError(
            f"{location}: image processors of type {found} are not supported for {model_type} models; "
            f"use the model's own, which has the type {expected}"
        )
    return made, files


def end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response: those of the generation config, then the tokenizer's if it is another one."""
    listed = model.generation_config.eos_token_id if model.generation_config is not None else None
    candidates = [*(listed if isinstance(listed, list | tuple) else [listed]), tokenizer.eos_token_id]
    ids = tuple(dict.fromkeys(int(token) for token in candidates if token is not None))
    if not ids:
        raise ModelError(
            f"{model.config.name_or_path or 'the model'}: has no end token, so every response would run to its "
            "length limit; set eos_token_id in generation_config.json"
        )
    return ids


def read_config(location: Path | str, key: str) -> Any:
    """The model's config.json as transformers reads it."""
    try:
        return AutoConfig.from_pretrained(location)
    except Exception as error:  # the error depends on the architecture's config class
        raise _cannot_read(location, "config", error, key) from error


def vocabulary_size(path: str) -> int:
    """The number of tokens that the model of ``path`` knows, without loading its weights."""
    source = resolve_model(path)
    if source.kind == "tiny":
        return int(build_config(find_preset(path)).get_text_config().vocab_size)
    return int(read_config(locate(source), "model.path").get_text_config().vocab_size)


def _load_pretrained(location: Path | str, dtype: torch.dtype, key: str) -> Any:
    model = load_with(_auto_class(location, read_config(location, key), key), location, dtype, key)
    _repair_generation_config(model)
    return model


def load_with(auto_class: Any, location: Path | str, dtype: torch.dtype, key: str) -> Any:
    """A model in eval mode by one of transformers' auto classes, with all its weights from the files."""
    config = read_config(location, key)
    if isinstance(location, Path):
        folder_checks.check_weights(location, key)
    # Progress bars stay on for a hub model: they show the download.
    silence = quiet() if isinstance(location, Path) else nullcontext()
    try:
        with silence:
            model, report = auto_class.from_pretrained(
                location, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except Exception as error:  # architectures raise arbitrary errors when a shape in config.json makes no sense
        raise _cannot_read(location, "weights", error, key) from error
    _check_report(location, report)
    return model.eval()


def _repair_generation_config(model: Any) -> None:
    """Some models ship a temperature without ``do_sample``, which transformers reads but refuses to save."""
    config = model.generation_config
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True


def _auto_class(location: Path | str, config: Any, key: str) -> Any:
    """The transformers class to load with; only models that continue text are accepted."""
    check_supported(config, _config_name(location, key))
    text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    vision = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    for class_name, auto_class in ((vision, AutoModelForImageTextToText), (text, AutoModelForCausalLM)):
        if class_name is not None and class_name in (config.architectures or [class_name]):
            return auto_class
    named = ", ".join(config.architectures or [config.model_type])
    raise ModelError(
        f"{_config_name(location, key)}: architecture {named} is not a causal language model; "
        "use a model whose architecture ends in ForCausalLM"
    )


def _check_report(location: Path | str, report: dict[str, Any]) -> None:
    """Refuse weights that do not fit. transformers would initialise missing weights at random and continue."""
    problems = []
    if report["missing_keys"]:
        problems.append(f"missing {_first(report['missing_keys'])}")
    if report["unexpected_keys"]:
        problems.append(f"unexpected {_first(report['unexpected_keys'])}")
    if report["mismatched_keys"]:
        shapes = (
            f"{key} has shape {tuple(found)}, not {tuple(wanted)}" for key, found, wanted in report["mismatched_keys"]
        )
        problems.append(f"wrong shape: {_first(shapes)}")
    if report["error_msgs"]:
        problems.append(_first(report["error_msgs"]))
    if problems:
        raise ModelError(
            f"{location}: the weights do not fit config.json: {'; '.join(problems)}; "
            "use the config.json the weights were saved with, or save the model again"
        )


def _check_vocabulary(location: Path | str, tokenizer: Any, config: Any) -> None:
    num_embeddings = config.get_text_config(decoder=True).vocab_size
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < 0:
        raise ModelError(
            f"{location}: the tokenizer has no tokens; copy the tokenizer files of the model into the folder"
        )
    if largest >= num_embeddings:
        raise ModelError(
            f"{location}: the tokenizer has token id {largest}, but the model has only {num_embeddings} embeddings "
            "(vocab_size in config.json); use the tokenizer the model was trained with"
        )


def _cannot_read(location: Path | str, what: str, error: Exception, key: str) -> ModelError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = f"{type(error).__name__}: {' '.join(lines[:2]) or 'no message'}"
    if isinstance(error, ImportError):
        return ModelError(f"{location}: its {what} needs a package that is not installed ({cause}); install it")
    if isinstance(location, Path):
        return ModelError(f"{location}: cannot use its {what} ({cause}); copy or save the model folder again")
    return ModelError(
        f"{key} = {location}: the hub has no usable {what} of this model ({cause}); check the name and the network, "
        "or give a local folder, tiny:<preset> or smollm2"
    )


def _config_name(location: Path | str, key: str) -> str:
    return str(location / "config.json") if isinstance(location, Path) else f"{key} = {location}"


def _first(items: Iterable[Any]) -> str:
    shown = sorted(str(item) for item in items)
    rest = len(shown) - _NUM_KEYS_SHOWN
    return ", ".join(shown[:_NUM_KEYS_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
