"""``headwater serve``: serve a model over HTTP."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO, get_args

from headwater.config.convert import Converter
from headwater.config.keys import sections
from headwater.config.paths import looks_like_folder
from headwater.config.recipe import parse_override
from headwater.config.schema import Dtype, EngineConfig
from headwater.config.server_checks import cache_size_problem
from headwater.config.tree import COMMAND_LINE, Branch, Origin, Tree, merge
from headwater.core.errors import ConfigError, HeadwaterError, ModelError
from headwater.models.source import check_model
from headwater.observe.manifest import MANIFEST, damage
from headwater.observe.progress import discard
from headwater.observe.run_directory import RunDirectory
from headwater.serving.options import (
    DEFAULT_MAX_BODY_MIB,
    DEFAULT_MAX_RESPONSES,
    DEFAULT_PORT,
    KEY_VARIABLE,
    ServerOptions,
)

HELP = (
    "Serve a model over HTTP: OpenAI's /v1/completions and /v1/chat/completions, SGLang's /generate, and control calls "
    "(pause, weights, metrics). Ctrl-C stops it. docs/server.md shows requests and answers."
)

_STOP_LIMIT_S = 20.0
"""How long stopping may take after standard input has ended."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a model folder, a run directory (its newest model), a hub id, tiny:<preset> (for example tiny:qwen3) or "
        "smollm2",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="engine.key=value",
        help="settings of the engine, for example engine.max_queue=64",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        default="embedded",
        help="the engine that generates: embedded, hf, or a class such as my_package.my_module:Engine; "
        "default embedded",
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        default="auto",
        help="number type; default auto: bfloat16 on a GPU that computes in it, otherwise float32",
    )
    parser.add_argument("--device", default="auto", help="auto (CUDA when there is one), cpu, cuda or cuda:N")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads for the model; 0 leaves the choice to torch; default $OMP_NUM_THREADS, or else half of the "
        "CPUs that this process may use",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights of tiny: models; default 0")
    add_listening(parser)


def add_listening(parser: argparse.ArgumentParser) -> None:
    """The options of a command that listens for requests."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1, which only this machine can reach"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"port to listen on; default {DEFAULT_PORT}; 0 chooses a free port",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what clients must send as 'Authorization: Bearer KEY'; default ${KEY_VARIABLE}, which ps does not show",
    )
    parser.add_argument(
        "--max-body-mib",
        type=float,
        metavar="MIB",
        default=DEFAULT_MAX_BODY_MIB,
        help=f"largest accepted request; default {DEFAULT_MAX_BODY_MIB}",
    )
    parser.add_argument(
        "--max-responses",
        type=int,
        metavar="N",
        default=DEFAULT_MAX_RESPONSES,
        help="most responses that one request may ask for (prompts times n, the samples per prompt); "
        f"default {DEFAULT_MAX_RESPONSES}",
    )
    parser.add_argument(
        "--allowed-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a name under which clients reach this server, if there is no API key; repeat it for more names. "
        "localhost, this machine's name, --host and IP addresses are always allowed; '*' allows every name",
    )
    parser.add_argument(
        "--tool-parser",
        metavar="NAME",
        default="auto",
        help="format of the model's tool calls, for example hermes; default auto: chosen from the chat template",
    )
    parser.add_argument(
        "--allow-remote-images",
        action="store_true",
        help="download images that a chat gives as http:// or https:// addresses; clients can then make this machine "
        "open addresses that only it can reach. By default, only data URLs are accepted",
    )
    parser.add_argument(
        "--until-eof",
        action="store_true",
        help="stop when standard input closes, which happens when the parent process ends",
    )
    parser.add_argument(
        "--served-name",
        metavar="NAME",
        help="the model's name in requests and replies; default MODEL, and for a folder its last part too",
    )


def run(args: argparse.Namespace) -> int:
    config = read_engine_config(args.overrides)
    model = find_model(args.model)
    check_model(model, "MODEL")  # a mistyped name is refused before torch is imported
    options = read_options(args, served_name=args.served_name or args.model, model=model)
    with listening(args, options) as taken:
        from headwater.backends import BACKENDS, LoadsModels
        from headwater.models.device import resolve_device, resolve_dtype
        from headwater.models.load import check_files, load_processor, load_tokenizer
        from headwater.serving.listen import serve
        from headwater.serving.state import find_parser

        _set_threads(args.threads)
        backend = BACKENDS.resolve(args.backend)
        if not isinstance(backend, LoadsModels):
            raise HeadwaterError(
                f"--backend = {args.backend}: cannot be served, because it has no method load(model_path, ...); "
                "use embedded or hf"
            )
        # Checked here as well as by the engine, because messages of an engine name the settings of a recipe.
        device = resolve_device(args.device, "--device")
        dtype = str(resolve_dtype(args.dtype, args.device)).removeprefix("torch.")
        _tell(f"loading {model} in {dtype} on {device}")
        tokenizer = load_tokenizer(model, key="MODEL")
        find_parser(options.tool_parser, tokenizer)  # before the model is loaded, which takes longer
        check_files(model, "MODEL")
        engine = backend.load(model, config, tokenizer=tokenizer, dtype=args.dtype, device=args.device, seed=args.seed)
        try:
            options = replace(options, device=str(device))
            serve(engine, tokenizer, options, taken, say=say, processor=load_processor(model, key="MODEL"))
        finally:
            engine.close()
    return 0


@contextmanager
def listening(args: argparse.Namespace, options: ServerOptions) -> Iterator[socket.socket]:
    """The port, taken before anything that lasts, so that one in use is reported immediately."""
    if args.until_eof:
        threading.Thread(target=_stop_at_eof, name="until-eof", daemon=True).start()
    if not 0 <= args.port <= 65535:
        raise HeadwaterError(f"--port = {args.port}: must be in 0 to 65535; 0 takes a free one")

    from headwater.serving.listen import bind

    with bind(args.host, args.port) as taken:
        if not options.api_key and not is_loopback(taken.getsockname()[0]):
            _tell(
                f"warning: --host = {args.host} without an API key: anyone who can reach this machine may generate, "
                f"read files as weights and stop the engine; set {KEY_VARIABLE}"
            )
        yield taken


def find_model(model: str) -> str:
    """The model to load: of a run directory the newest one, of a checkpoint the one in it, otherwise ``model``."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return model
    if (folder / "config.yaml").is_file():
        run = RunDirectory(folder)
        found = [run.model(step) for step in run.checkpoint_steps() if (run.model(step) / "config.json").is_file()]
        if not found:
            raise ModelError(
                f"MODEL = {model}: is a run directory without a checkpoint, so there is no model to serve yet; wait "
                "for its first checkpoint (trainer.checkpoint_every_steps)"
            )
        _tell(f"{model} is a run directory; its newest model is {found[-1]}")
        return _whole(found[-1])
    if (folder / "model" / "config.json").is_file():
        return _whole(folder / "model")
    return model


def _whole(model: Path) -> str:
    """The model of a checkpoint, if its files are as they were saved."""
    checkpoint = model.parent
    if (checkpoint / MANIFEST).exists() and (problems := damage(checkpoint, part=model.name)):
        raise ModelError(
            f"MODEL = {model}: {problems[0]}; serve another checkpoint of the run (`headwater "
            "doctor --verify` says which are whole)"
        )
    return str(model)


def num_threads(wanted: int | None, environment: Mapping[str, str]) -> int:
    """The CPU threads for the model. 0 leaves the choice to torch.

    The default is half of the CPUs, which is the number of cores if each shows as two CPUs. The other half serves
    requests. Threads that share one operation wait for each other, so on a busy machine more of them are slower.
    """
    if wanted is not None:
        if wanted < 0:
            raise HeadwaterError(f"--threads = {wanted}: must be >= 0; 0 leaves the choice to torch")
        return wanted
    if environment.get("OMP_NUM_THREADS"):
        return 0  # torch reads it itself
    return max(1, _num_cpus() // 2)


def _num_cpus() -> int:
    """The CPUs that this process may use: those it is bound to, or fewer if its container has a quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    return count


def _set_threads(wanted: int | None) -> None:
    count = num_threads(wanted, os.environ)
    if count:
        import torch

        torch.set_num_threads(count)


@dataclass(frozen=True)
class _Settings:
    """The dotted settings that this command accepts."""

    engine: EngineConfig = field(default_factory=EngineConfig)


def read_engine_config(overrides: Sequence[str]) -> EngineConfig:
    """``engine.key=value`` settings, checked like those of a recipe."""
    problems: list[str] = []
    tree: Tree = Branch({}, Origin(COMMAND_LINE, 0))
    for text in overrides:
        override = parse_override(text, 1, problems)
        if override is not None:
            tree = merge(tree, override, sections(_Settings))
    assert isinstance(tree, Branch)
    converter = Converter(_Settings)
    settings: _Settings = converter.build(tree)
    problems.extend(converter.problems)
    if (problem := cache_size_problem(settings.engine)) is not None:
        problems.append(f"engine.memory_fraction = {settings.engine.memory_fraction:g}: {problem}")
    if problems:
        raise ConfigError(problems, COMMAND_LINE)
    return settings.engine


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def read_options(args: argparse.Namespace, *, served_name: str, model: str) -> ServerOptions:
    max_body_bytes = int(args.max_body_mib * 2**20) if args.max_body_mib > 0 else 0
    if max_body_bytes < 1:
        raise HeadwaterError(f"--max-body-mib = {args.max_body_mib}: must be > 0, for example {DEFAULT_MAX_BODY_MIB}")
    if args.max_responses < 1:
        raise HeadwaterError(f"--max-responses = {args.max_responses}: must be >= 1, for example 4096")
    api_key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE, "")
    if args.api_key == "":
        raise HeadwaterError("--api-key is empty; give a key, or leave the option out to let everyone in")
    return ServerOptions(
        served_name=served_name,
        short_name="" if args.served_name or not looks_like_folder(served_name) else _last_part(served_name),
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        max_responses=args.max_responses,
        allowed_hosts=(args.host, *args.allowed_host),
        model_path=model,
        fetches_media=args.allow_remote_images,
        tool_parser=args.tool_parser,
    )


def _last_part(folder: str) -> str:
    """The name of a folder without those that it is in."""
    return os.path.basename(os.path.abspath(os.path.expanduser(folder)))  # Path keeps the dots of ``..``


def _stop_at_eof() -> None:
    # Not through sys.stdin, whose lock would still be held at interpreter exit.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_LIMIT_S)
    os._exit(1)  # no parent process is left that could kill it


def say(text: str) -> None:
    """For programs too: the parent process may be waiting for this line on a pipe."""
    _print(text, sys.stdout)


def _tell(text: str) -> None:
    """For people."""
    _print(text, sys.stderr)


def _print(text: str, file: TextIO) -> None:
    try:
        print(text, file=file, flush=True)
    except OSError:  # the pipe or the terminal is closed: the server keeps running
        discard(file)
