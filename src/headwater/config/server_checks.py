"""Settings of engines and servers that are valid alone but not together."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from typing import get_args
from urllib.parse import urlsplit

from headwater.config.clash import Check, Clash, Layers, is_contradicted, unread
from headwater.config.declared import WrongDeclaration, read_declared
from headwater.config.keys import settings, value_at
from headwater.config.rollout_schema import WeightTransfer
from headwater.config.schema import Config, EngineConfig
from headwater.config.traits import BackendTraits
from headwater.config.tree import show

_KEPT_BY_SERVERS = ("engine.update_mode", "engine.deterministic")
"""The settings of the section ``engine`` that also concern a server that was started with its own settings."""
_BESIDE_RANKS = ("rollout.launch.num_servers", "rollout.launch.python", "rollout.launch.args")
"""The settings that also concern servers which Ray starts beside the ranks of the learner."""


def backend_traits(config: Config) -> BackendTraits:
    """What ``rollout.backend`` declares. A class whose source cannot be read has the defaults."""
    try:
        declared = read_declared(BackendTraits, config.rollout.backend)
    except WrongDeclaration:  # ``engine_settings_are_read`` reports it
        return BackendTraits()
    return declared.traits if declared is not None else BackendTraits()


def is_on_this_machine(url: str) -> bool:
    """Whether a server's address is one of this machine, as far as that can be told."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost") or host == socket.gethostname().lower():
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or str(address) in _own_addresses()


def _own_addresses() -> set[str]:
    try:
        return set(socket.gethostbyname_ex(socket.gethostname())[2])
    except OSError:  # this machine's name has no address
        return set()


def chosen_transfer(config: Config) -> WeightTransfer | None:
    """How weights travel to the servers of this run; None if no supported way works for them."""
    if config.rollout.weight_transfer != "auto":
        return config.rollout.weight_transfer
    supported = supported_transfers(config)
    works = [each for each in get_args(WeightTransfer) if each in supported and not transfer_problem(config, each)]
    return min(works, key=supported.index, default=None)


def supported_transfers(config: Config) -> tuple[str, ...]:
    """The ways in which weights can travel to servers of this kind, the preferred one first."""
    traits = backend_traits(config)
    if config.rollout.publish == "adapter" and traits.is_foreign:  # other programs load adapters in peft's format
        return ("file",)
    if config.rollout.weight_folder and traits.is_foreign:  # it is given for servers that take only files
        return tuple(sorted(traits.transfers, key="file".__ne__))
    return traits.transfers


def transfer_problem(config: Config, transfer: str) -> str | None:
    """Why a transfer does not work for ``rollout.servers``, and the remedy."""
    rollout = config.rollout
    far = [url for url in rollout.servers if not is_on_this_machine(url)]
    if transfer == "cuda_ipc" and (config.model.device == "cpu" or config.cluster.kind == "ray"):
        ray = "Ray gives every process its own GPUs"
        reason = ray if config.cluster.kind == "ray" else "model.device = cpu has no memory on a GPU"
        return f"{reason}; use rollout.weight_transfer=auto"
    if transfer in ("shared_memory", "cuda_ipc") and far:
        return (
            f"{far[0]} is not on this machine, so it has no memory in common with the learner; use "
            "rollout.weight_transfer=collective, or file with rollout.weight_folder, a folder that both machines see"
        )
    if transfer == "file" and far and not rollout.weight_folder:
        return (
            f"{far[0]} is not on this machine, so it cannot read a temporary file of this one; set "
            "rollout.weight_folder to a folder that both machines see"
        )
    return None


def servers_have_a_backend(config: Config, layers: Layers) -> Iterator[Clash]:
    rollout, traits = config.rollout, backend_traits(config)
    if rollout.servers and not traits.connects:
        yield Clash(
            ("rollout.servers", "rollout.backend"),
            f"rollout.backend = {rollout.backend} does not talk to servers; use rollout.backend=native for `headwater "
            "serve`, or vllm or sglang",
        )
    if traits.needs_servers and not rollout.is_separate:
        yield Clash(
            ("rollout.backend", "rollout.placement", "rollout.servers"),
            f"{rollout.backend} talks to servers; name running ones in rollout.servers, or use "
            "rollout.placement=disaggregated to start some",
        )
    urls = [url.rstrip("/") for url in rollout.servers]
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield Clash(("rollout.servers",), f"{url} is named twice; name every server once")


def launch_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    # Compared with the defaults: a resolved recipe gives every key, and must load again.
    rollout, launch, traits = config.rollout, config.rollout.launch, backend_traits(config)
    if rollout.servers or not rollout.is_separate:
        why, other = "rollout.placement = colocated starts no server", "rollout.placement"
        remedy = "use rollout.placement=disaggregated, or remove this"
        if rollout.servers:
            why, other, remedy = "rollout.servers names running ones", "rollout.servers", "remove one of the two"
        for key, setting in settings(Config).items():
            if key in _BESIDE_RANKS and config.cluster.kind == "ray" and not rollout.servers:
                continue
            if key.startswith("rollout.launch.") and value_at(config, key) != setting.default():
                yield Clash((key, other), f"nothing reads this, because {why}; {remedy}")
        return
    for key in ("rollout.launch.python", "rollout.launch.tensor_parallel"):
        if not traits.is_foreign and value_at(config, key) != settings(Config)[key].default():
            yield Clash(
                (key, "rollout.backend"),
                f"the servers of rollout.backend = {rollout.backend} do not read this; use vllm or sglang, or set it "
                f"back to {show(settings(Config)[key].default())}",
            )
    needed = launch.count * launch.tensor_parallel
    if launch.devices and len(launch.devices) != needed:
        yield Clash(
            ("rollout.launch.devices", "rollout.launch.num_servers"),
            f"has {len(launch.devices)} devices for {launch.count} servers (rollout.launch.num_servers) with "
            f"rollout.launch.tensor_parallel = {launch.tensor_parallel}; name {needed}, or none",
        )
    if launch.devices and rollout.device != "auto":
        yield Clash(
            ("rollout.device", "rollout.launch.devices"),
            "rollout.launch.devices names the devices already; remove one of the two",
        )


def engine_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    # Compared with the default, not with what was given: a resolved recipe gives every key, and must load again.
    backend = config.rollout.backend
    try:
        declared = read_declared(BackendTraits, backend)
    except WrongDeclaration as error:
        yield Clash(("rollout.backend",), str(error))
        return
    read = {f"engine.{name}" for name in declared.traits.engine_settings} if declared is not None else set()
    if config.rollout.servers:
        read = set(_KEPT_BY_SERVERS)
    for key, setting in settings(Config).items():
        is_read = not read or key in read or not key.startswith("engine.")
        if not is_read and value_at(config, key) != setting.default():
            yield Clash(
                (key, "rollout.backend"),
                f"the {backend} backend does not read this; use rollout.backend=embedded, or set it back to "
                f"{show(setting.default())}",
            )


def cache_size_problem(engine: EngineConfig) -> str | None:
    """Why the settings of the size of the KV cache do not go together; also for ``headwater serve``."""
    if not (engine.kv_cache_gib and engine.memory_fraction):
        return None
    return (
        f"nothing reads this, because engine.kv_cache_gib = {engine.kv_cache_gib:g} is the size of the KV cache; set "
        "one of them to 0"
    )


def cache_has_one_size(config: Config, layers: Layers) -> Iterator[Clash]:
    problem = cache_size_problem(config.engine)
    if problem is not None and is_contradicted("engine.memory_fraction", "engine.kv_cache_gib", layers):
        yield Clash(("engine.memory_fraction", "engine.kv_cache_gib"), problem)


def weight_transfer_works(config: Config, layers: Layers) -> Iterator[Clash]:
    rollout, traits = config.rollout, backend_traits(config)
    wanted = rollout.weight_transfer
    # Another program has separate processes for the weights, also in the learner's process.
    is_one_process = not rollout.is_separate and config.cluster.kind == "local" and not traits.is_foreign
    if is_one_process and wanted != "auto":
        yield Clash(
            ("rollout.weight_transfer", "rollout.placement"),
            "nothing reads this, because rollout.placement = colocated passes weights within the process; use "
            "rollout.placement=disaggregated, or set it back to 'auto'",
        )
    elif not is_one_process:
        supported = supported_transfers(config)
        if wanted != "auto" and wanted not in supported:
            what = "weights" if supported == traits.transfers else "adapters"
            yield Clash(
                ("rollout.weight_transfer", "rollout.backend"),
                f"the servers of rollout.backend = {rollout.backend} take {what} through {' or '.join(supported)}; use "
                "one of these, or auto",
            )
        elif (problem := transfer_problem(config, chosen_transfer(config) or supported[0])) is not None:
            yield Clash(("rollout.weight_transfer", "rollout.servers"), problem)


def server_limits_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    rollout, default = config.rollout, settings(Config)["rollout.server_timeout_s"].default()
    if not rollout.is_separate and config.cluster.kind == "local" and rollout.server_timeout_s != default:
        yield Clash(
            ("rollout.server_timeout_s", "rollout.placement"),
            "nothing reads this, because rollout.placement = colocated generates in this process; use "
            f"rollout.placement=disaggregated, or set it back to {show(default)}",
        )
    if rollout.max_staleness == 0:
        why = "rollout.max_staleness = 0 means that no token is stale; use more"
        yield from unread(["rollout.on_stale"], ("rollout.max_staleness",), why, layers)


def adapters_can_be_published(config: Config, layers: Layers) -> Iterator[Clash]:
    rollout, lora = config.rollout, config.lora
    for name in ("rank", "alpha", "targets"):
        key = f"engine.adapter_{name}"
        default = settings(Config)[key].default()
        if value_at(config, key) != default:
            yield Clash(
                (key, "rollout.publish"),
                f"a run sets this from lora.{name}; use rollout.publish=adapter, and set it back to {show(default)}",
            )
    if rollout.publish == "full":
        return
    remedy = "or set it back to 'full'"
    if not lora.rank:
        yield Clash(("rollout.publish", "lora.rank"), f"the run trains no adapters; use lora.rank=16, {remedy}")
    if not backend_traits(config).takes_adapters:
        yield Clash(
            ("rollout.publish", "rollout.backend"),
            f"rollout.backend = {rollout.backend} does not take adapters alone; use embedded, native or vllm, {remedy}",
        )


def weight_link_has_gpus(config: Config, layers: Layers) -> Iterator[Clash]:
    """``backends.fleet`` and ``cluster.resources`` check what depends on the GPUs of the machines."""
    rollout, key = config.rollout, "rollout.weight_link"
    if rollout.weight_link == "gloo":
        return
    remedy = "or set it back to 'gloo'"
    if config.cluster.kind == "ray" and not rollout.is_separate:
        yield Clash(
            (key, "rollout.placement"),
            "a colocated server shares the GPU of a learner rank, and NCCL needs a separate GPU for each; use "
            f"rollout.placement=disaggregated, {remedy}",
        )
        return
    if not (rollout.is_separate and chosen_transfer(config) == "collective"):
        yield Clash(
            (key, "rollout.weight_transfer"),
            "nothing reads this, because only rollout.weight_transfer=collective to servers uses a link; use it, "
            f"{remedy}",
        )
        return
    if config.cluster.kind == "ray" and backend_traits(config).is_foreign:
        yield Clash(
            (key, "rollout.backend", "cluster.kind"),
            f"the process of the training loop sends the weights to {rollout.backend} servers, and with cluster.kind = "
            "ray it has no GPU to send from; use rollout.weight_link=gloo, or another rollout.backend",
        )
        return
    if rollout.weight_link not in (links := backend_traits(config).links):
        yield Clash(
            (key, "rollout.backend"),
            f"the servers of rollout.backend = {rollout.backend} take weights over {' or '.join(links)}; use another "
            f"rollout.backend, {remedy}",
        )
        return
    used = {"model.device": [config.model.device]}
    if not rollout.servers:
        used |= {"rollout.device": [rollout.device], "rollout.launch.devices": list(rollout.launch.devices)}
    for other, devices in used.items():
        if "cpu" in devices:
            yield Clash((key, other), f"NCCL sends from GPU to GPU, and {other} names the CPU; use GPUs, {remedy}")


def weight_encoding_is_read(config: Config, layers: Layers) -> Iterator[Clash]:
    rollout = config.rollout
    if rollout.weight_encoding == "plain":
        return
    if backend_traits(config).is_foreign:
        yield Clash(
            ("rollout.weight_encoding", "rollout.backend"),
            f"only `headwater serve` decodes weights, and rollout.backend = {rollout.backend} does not; use native, or "
            "set it back to 'plain'",
        )
    elif not (rollout.is_separate and chosen_transfer(config) == "collective"):
        yield Clash(
            ("rollout.weight_encoding", "rollout.weight_transfer"),
            "only rollout.weight_transfer=collective to servers encodes weights; use it, or set it back to 'plain'",
        )


def update_order_is_read(config: Config, layers: Layers) -> Iterator[Clash]:
    rollout = config.rollout
    if rollout.update_order == "together":
        return
    remedy = "or set it back to 'together'"
    num_servers = len(rollout.servers) or (rollout.launch.count if rollout.is_separate else 0)
    if num_servers < 2 and (rollout.is_separate or config.cluster.kind == "local"):
        yield Clash(
            ("rollout.update_order", "rollout.launch.num_servers", "rollout.servers"),
            "the run has only one engine, so no other one generates meanwhile; use rollout.placement=disaggregated "
            f"with rollout.launch.num_servers=2, {remedy}",
        )
    if rollout.max_staleness == 0:
        yield Clash(
            ("rollout.update_order", "rollout.max_staleness"),
            "rollout.max_staleness = 0 generates nothing during an update; use more, " + remedy,
        )
    if config.run.deterministic:
        yield Clash(
            ("rollout.update_order", "run.deterministic"),
            f"run.deterministic finishes all responses before an update; set it to false, {remedy}",
        )
    if rollout.weight_encoding == "delta":
        yield Clash(
            ("rollout.update_order", "rollout.weight_encoding"),
            "the ranks connect to one server at a time, and the first update of a connection has all weights, so delta "
            f"saves nothing; use rollout.weight_encoding=plain, {remedy}",
        )


def weight_folder_is_read(config: Config, layers: Layers) -> Iterator[Clash]:
    rollout = config.rollout
    # Another program has separate processes for the weights, also in the learner's process.
    has_servers = rollout.is_separate or backend_traits(config).is_foreign
    if rollout.weight_folder and not (has_servers and chosen_transfer(config) == "file"):
        yield Clash(
            ("rollout.weight_folder", "rollout.weight_transfer"),
            "only rollout.weight_transfer=file to servers writes weights to a folder; use it, or remove this",
        )


def running_servers_have_devices(config: Config, layers: Layers) -> Iterator[Clash]:
    is_given = is_contradicted("rollout.device", "rollout.servers", layers)
    if config.rollout.servers and config.rollout.device != "auto" and is_given:
        yield Clash(
            ("rollout.device", "rollout.servers"),
            "nothing reads this, because rollout.servers names running ones, which have their devices; remove one of "
            "the two",
        )


def colocated_engine_has_the_learners_device(config: Config, layers: Layers) -> Iterator[Clash]:
    device = config.rollout.device
    if not config.rollout.is_separate and device not in ("auto", config.model.device):
        yield Clash(
            ("rollout.device", "rollout.placement"),
            f"a colocated engine runs on the learner's device, model.device = {show(config.model.device)}; use "
            "rollout.placement=disaggregated, or set it back to 'auto'",
        )


def offloading_learner_takes_turns(config: Config, layers: Layers) -> Iterator[Clash]:
    if not config.learner.offload_during_rollout:
        return
    remedy = "set it to false"
    if config.rollout.max_staleness > 0:
        yield Clash(
            ("learner.offload_during_rollout", "rollout.max_staleness"),
            "the learner and the engine must take turns on the device, but with rollout.max_staleness = "
            f"{config.rollout.max_staleness} both work at the same time; {remedy}, or use rollout.max_staleness=0",
        )
    if config.rollout.servers:
        yield Clash(
            ("learner.offload_during_rollout", "rollout.servers"),
            "running servers do not take turns with the learner, because the run knows neither their GPUs nor their "
            f"options; {remedy}, or use rollout.placement=colocated without rollout.servers",
        )
    elif config.rollout.is_separate:
        yield Clash(
            ("learner.offload_during_rollout", "rollout.placement"),
            "with rollout.placement = disaggregated, the engine runs in a separate process, which does not take turns "
            f"with the learner; {remedy}, or use rollout.placement=colocated",
        )


def residency_can_be_followed(config: Config, layers: Layers) -> Iterator[Clash]:
    key, chosen = "learner.residency", config.learner.residency
    alone = [each for each in ("auto", "resident") if each in chosen]
    if not chosen or (alone and len(chosen) > 1):
        yield Clash((key,), "must be [auto], [resident], or a list of kv_cache, weights, parameters and optimizer")
        return
    released = [each for each in chosen if each in ("kv_cache", "weights")]
    if released and not config.engine.keep_addresses and is_contradicted("engine.keep_addresses", key, layers):
        yield Clash(
            ("engine.keep_addresses", key),
            f"nothing reads this, because what {key} releases ({released[0]}) must come back at the same addresses; "
            "remove this",
        )
    named = [each for each in chosen if each in ("kv_cache", "weights", "parameters")]
    remedy = "use [auto]"
    if chosen == ("optimizer",) and (config.rollout.is_separate or not backend_traits(config).is_planned):
        yield Clash(
            (key, "rollout.backend", "rollout.placement"),
            "a plan is made only for the embedded engine in the learner's process; use learner.offload_optimizer=true "
            f"without a plan, and {remedy} here",
        )
    if not named:
        return
    if config.rollout.max_staleness > 0:
        yield Clash(
            (key, "rollout.max_staleness"),
            f"{named[0]} can only leave the GPU if generation and training take turns, but with rollout.max_staleness "
            f"= {config.rollout.max_staleness} both run at the same time; {remedy}, or rollout.max_staleness=0",
        )
    if config.rollout.is_separate or not backend_traits(config).is_planned:
        yield Clash(
            (key, "rollout.backend", "rollout.placement"),
            f"{named[0]} leaves the GPU only beside the embedded engine in the same process; {remedy}, or "
            "rollout.backend=embedded with rollout.placement=colocated",
        )
    if "weights" in named and config.rollout.publish != "full":
        yield Clash(
            (key, "rollout.publish"),
            "the engine's weights are released without a copy, so that every publication must bring all of them; use "
            "rollout.publish=full, or leave weights out",
        )


SERVER_CHECKS: tuple[Check, ...] = (
    servers_have_a_backend,
    launch_settings_are_read,
    engine_settings_are_read,
    weight_transfer_works,
    weight_folder_is_read,
    update_order_is_read,
    weight_link_has_gpus,
    weight_encoding_is_read,
    server_limits_are_read,
    adapters_can_be_published,
    cache_has_one_size,
    running_servers_have_devices,
    colocated_engine_has_the_learners_device,
    offloading_learner_takes_turns,
    residency_can_be_followed,
)
