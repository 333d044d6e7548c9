"""``headwater serve``: serve a model over HTTP."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from headwater.config.convert import Converter
from headwater.config.keys import sections
from headwater.config.recipe import parse_override
from headwater.config.schema import Dtype, EngineConfig
from headwater.config.tree import COMMAND_LINE, Branch, Origin, Tree, merge
from headwater.core.errors import ConfigError, HeadwaterError, ModelError
from headwater.core.protocols import InferenceEngine
from headwater.observe.progress import discard
from headwater.observe.run_directory import RunDirectory
from headwater.serving.options import DEFAULT_MAX_BODY_MIB, DEFAULT_PORT, KEY_VARIABLE, ServerOptions

HELP = (
    "Serve a model over HTTP: OpenAI's /v1/completions and /v1/chat/completions, SGLang's /generate, and control calls "
    "(pause, weights, metrics). Ctrl-C stops it. docs/server.md shows requests and answers."
)

_STOP_LIMIT_S = 20.0
"""How long stopping may take after standard input has ended."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder, a hub id, tiny:<preset> (for example tiny:qwen3) or smollm2")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="engine.key=value",
        help="settings of the engine, for example engine.max_queue=64",
    )
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
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights of tiny: models; default 0")
    parser.add_argument(
        "--until-eof",
        action="store_true",
        help="stop when standard input closes, which happens when the parent process ends",
    )
    parser.add_argument("--served-name", metavar="NAME", help="the model's name in requests and replies; default MODEL")


def run(args: argparse.Namespace) -> int:
    if args.until_eof:
        threading.Thread(target=_stop_at_eof, name="until-eof", daemon=True).start()
    config = read_engine_config(args.overrides)
    options = _options(args)
    check_model_folder(args.model)
    if not 0 <= args.port <= 65535:
        raise HeadwaterError(f"--port = {args.port}: must be in 0 to 65535; 0 takes a free one")

    from headwater.serving.listen import bind, serve

    taken = bind(args.host, args.port)
    with taken:
        if not options.api_key and not is_loopback(taken.getsockname()[0]):
            print(
                f"warning: --host = {args.host} without an API key: anyone who can reach this machine may generate, "
                f"read files as weights and stop the engine; set {KEY_VARIABLE}",
                file=sys.stderr,
            )
        from headwater.backends import BACKENDS
        from headwater.models.load import load_tokenizer

        backend = BACKENDS.resolve(args.backend)
        if not hasattr(backend, "load"):
            raise HeadwaterError(
                f"--backend = {args.backend}: cannot be served, because it has no method load(model_path, ...); "
                "use embedded or hf"
            )
        try:
            tokenizer = load_tokenizer(args.model)
            engine: InferenceEngine = backend.load(
                args.model, config, tokenizer=tokenizer, dtype=args.dtype, device=args.device, seed=args.seed
            )
        except ModelError as error:
            # These are settings in a recipe, but arguments of this command.
            text = str(error).replace("model.path", "MODEL").replace("model.device", "--device")
            raise ModelError(text) from error
        try:
            serve(engine, tokenizer, options, taken, say=_say)
        finally:
            engine.close()
    return 0


def check_model_folder(model: str) -> None:
    """Point from a run directory or a checkpoint to the model that it contains."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return
    if (folder / "config.yaml").is_file():
        run = RunDirectory(folder)
        steps = run.checkpoint_steps()
        remedy = f"serve {run.model(steps[-1])}" if steps else "it has no checkpoint yet, so there is none to serve"
        raise ModelError(f"MODEL = {model}: is a run directory; its models are in checkpoints/step_N/model: {remedy}")
    if (folder / "model" / "config.json").is_file():
        raise ModelError(f"MODEL = {model}: is a checkpoint; its model is a folder in it: serve {folder / 'model'}")


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
    if problems:
        raise ConfigError(problems, COMMAND_LINE)
    return settings.engine


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _options(args: argparse.Namespace) -> ServerOptions:
    max_body_bytes = int(args.max_body_mib * 2**20) if args.max_body_mib > 0 else 0
    if max_body_bytes < 1:
        raise HeadwaterError(f"--max-body-mib = {args.max_body_mib}: must be > 0, for example {DEFAULT_MAX_BODY_MIB}")
    api_key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE, "")
    if args.api_key == "":
        raise HeadwaterError("--api-key is empty; give a key, or leave the option out to let everyone in")
    return ServerOptions(
        served_name=args.served_name or args.model,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        model_path=args.model,
    )


def _stop_at_eof() -> None:
    # Not through sys.stdin, whose lock would still be held at interpreter exit.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_LIMIT_S)
    os._exit(1)  # no parent process is left that could kill it


def _say(text: str) -> None:
    # Flushed, because the parent process may be waiting for this line on a pipe.
    try:
        print(text, flush=True)
    except OSError:  # the pipe or the terminal is closed: the server keeps running
        discard(sys.stdout)
