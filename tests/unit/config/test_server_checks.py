"""Settings of servers that are valid alone but not together."""

import re
import socket
from pathlib import Path
from typing import get_args

from headwater.config.load import load_config
from headwater.config.rollout_schema import WeightTransfer
from headwater.config.server_checks import backend_traits, chosen_transfer, is_on_this_machine

OWN = "rollout.placement=disaggregated"
NATIVE = "rollout.backend=native"
SGLANG = "rollout.backend=sglang"
VLLM = "rollout.backend=vllm"
NEAR = "rollout.servers=[http://127.0.0.1:8000, http://localhost:8001]"
FAR = "rollout.servers=[http://127.0.0.1:8000, http://10.9.8.7:8000]"

ROLLING = "rollout.update_order=rolling"
AHEAD = "rollout.max_staleness=1"
COLLECTIVE = "rollout.weight_transfer=collective"
NCCL = "rollout.weight_link=nccl"

ADAPTERS = ("lora.rank=4", "rollout.publish=adapter")

CLASHES = [
    ([NEAR], "rollout.servers", ["rollout.backend = embedded", "rollout.backend=native"]),
    ([NATIVE], "rollout.backend = 'native'", ["rollout.servers", "rollout.placement=disaggregated"]),
    (
        [NATIVE, "rollout.servers=[http://localhost:1, http://localhost:1/]"],
        "rollout.servers",
        ["http://localhost:1 is named twice"],
    ),
    ([NATIVE, "rollout.servers=[localhost:8000]"], "rollout.servers", ["http://10.0.0.5:8000", "http or https"]),
    (["rollout.launch.num_servers=2"], "rollout.launch.num_servers = 2", ["rollout.placement=disaggregated"]),
    ([NATIVE, NEAR, "rollout.launch.num_servers=2"], "rollout.launch.num_servers = 2", ["rollout.servers names"]),
    ([OWN, "rollout.launch.tensor_parallel=2"], "rollout.launch.tensor_parallel = 2", ["vllm or sglang"]),
    ([OWN, "rollout.launch.python=python3"], "rollout.launch.python", ["embedded", "vllm or sglang"]),
    ([OWN, "rollout.launch.devices=[cpu, cpu]"], "rollout.launch.devices", ["has 2 devices", "name 1"]),
    ([OWN, "rollout.launch.devices=[cpu]", "rollout.device=cpu"], "rollout.device = 'cpu'", ["remove one"]),
    ([NATIVE, NEAR, "engine.max_sequences=7"], "engine.max_sequences = 7", ["does not read this"]),
    ([OWN, "rollout.weight_folder=/nfs"], "rollout.weight_folder", ["rollout.weight_transfer=file"]),
    (
        [VLLM, FAR, "rollout.weight_transfer=file"],
        "rollout.weight_transfer",
        ["10.9.8.7:8000", "rollout.weight_folder"],
    ),
    ([VLLM, FAR, "rollout.weight_transfer=shared_memory"], "rollout.weight_transfer", ["no memory in common"]),
    (
        [VLLM, NEAR, "rollout.weight_transfer=cuda_ipc"],
        "rollout.weight_transfer",
        ["shared_memory or file or collective"],
    ),
    ([VLLM, NEAR, COLLECTIVE, NCCL], "rollout.weight_link", ["take weights over gloo", "another rollout.backend"]),
    ([SGLANG, FAR, "rollout.weight_encoding=delta"], "rollout.weight_encoding", ["headwater serve"]),
    (
        [SGLANG, NEAR, "rollout.weight_transfer=shared_memory"],
        "rollout.weight_transfer",
        ["file or collective"],
    ),
    ([NATIVE, FAR, "rollout.weight_transfer=shared_memory"], "rollout.weight_transfer", ["no memory in common"]),
    ([OWN, "rollout.weight_transfer=cuda_ipc", "model.device=cpu"], "rollout.weight_transfer", ["no memory on a GPU"]),
    ([NATIVE, FAR, "rollout.weight_transfer=file"], "rollout.weight_transfer", ["cannot read a temporary file"]),
    ([OWN, ROLLING, AHEAD], "rollout.update_order = 'rolling'", ["only one engine", "rollout.launch.num_servers=2"]),
    ([NATIVE, NEAR, ROLLING], "rollout.update_order", ["rollout.max_staleness = 0", "generates nothing"]),
    ([NATIVE, NEAR, ROLLING, AHEAD, "run.deterministic=true"], "rollout.update_order", ["run.deterministic"]),
    (
        [NATIVE, NEAR, ROLLING, AHEAD, "rollout.weight_transfer=collective", "rollout.weight_encoding=delta"],
        "rollout.update_order",
        ["delta saves nothing"],
    ),
    ([OWN, NCCL], "rollout.weight_link = 'nccl'", ["rollout.weight_transfer=collective", "back to 'gloo'"]),
    ([OWN, COLLECTIVE, NCCL, "model.device=cpu"], "rollout.weight_link", ["model.device names the CPU"]),
    ([OWN, COLLECTIVE, NCCL, "rollout.device=cpu"], "rollout.weight_link", ["rollout.device names the CPU"]),
    (
        [OWN, COLLECTIVE, NCCL, "rollout.launch.devices=[cpu]"],
        "rollout.weight_link",
        ["rollout.launch.devices names the CPU"],
    ),
    (["cluster=ray", COLLECTIVE, NCCL], "rollout.weight_link", ["shares the GPU", "rollout.placement=disaggregated"]),
    (
        ["cluster=ray", OWN, SGLANG, COLLECTIVE, NCCL],
        "rollout.weight_link = 'nccl'",
        ["sglang", "no GPU to send from", "rollout.weight_link=gloo", "another rollout.backend"],
    ),
    ([SGLANG, NEAR, *ADAPTERS], "rollout.publish = 'adapter'", ["sglang does not take adapters", "native or vllm"]),
    ([VLLM, FAR, *ADAPTERS], "rollout.weight_transfer = 'auto'", ["rollout.weight_folder"]),
    (["cluster=ray", SGLANG, FAR, NCCL], "rollout.weight_link = 'nccl'", ["no GPU to send from"]),
]

FITTING = [
    [VLLM, OWN, *ADAPTERS],
    [VLLM, FAR, "rollout.weight_folder=/nfs/weights", *ADAPTERS],
    [VLLM, *ADAPTERS],
    [VLLM, "rollout.weight_folder=/scratch", *ADAPTERS],
    [OWN, COLLECTIVE, *ADAPTERS],
    [NATIVE, FAR, "rollout.weight_encoding=delta", *ADAPTERS],
    [NATIVE, NEAR],
    [NATIVE, NEAR, ROLLING, AHEAD],
    [OWN, "rollout.launch.num_servers=2", ROLLING, AHEAD],
    [NATIVE, NEAR, "engine.deterministic=true", "engine.update_mode=interrupt"],
    [NATIVE, FAR, "rollout.weight_folder=/nfs/weights"],
    [NATIVE, FAR],
    [OWN, "rollout.weight_transfer=cuda_ipc", "model.device=cuda"],
    [SGLANG, FAR, "rollout.weight_folder=/nfs/weights"],
    [SGLANG, FAR],
    [SGLANG, FAR, COLLECTIVE, NCCL],
    [NATIVE, FAR, NCCL, "rollout.weight_encoding=delta"],
    ["cluster=ray", OWN, COLLECTIVE, NCCL],
    ["cluster=ray", OWN, SGLANG, COLLECTIVE],
    [SGLANG, OWN, "rollout.launch.tensor_parallel=2", "engine.max_sequences=64"],
    [NATIVE, OWN, "rollout.launch.num_servers=3", "rollout.launch.devices=[cpu, cpu, cpu]"],
    [OWN, "rollout.launch.num_servers=2", "rollout.launch.args=[--tool-parser, hermes]"],
]


def test_clashes_of_servers_name_the_remedy(assert_clashes):
    assert_clashes(CLASHES)


def test_settings_of_servers_that_go_together_load(assert_loads_again):
    assert_loads_again(FITTING)


def test_weights_take_the_first_way_that_works_for_the_servers():
    def chosen(*overrides: str) -> str | None:
        return chosen_transfer(load_config(None, overrides).config)

    assert chosen(OWN) == "shared_memory"
    assert chosen(NATIVE, NEAR) == "shared_memory"
    assert chosen(NATIVE, NEAR, "rollout.weight_transfer=file") == "file"
    assert chosen(NATIVE, FAR) == "collective"
    assert chosen(NATIVE, FAR, "rollout.weight_folder=/nfs") == "file"
    assert chosen(SGLANG, NEAR) == "file"
    assert chosen(VLLM) == chosen(VLLM, NEAR) == "shared_memory"
    assert chosen(VLLM, FAR) == "collective"
    assert chosen(VLLM, NEAR, "rollout.weight_folder=/nfs") == chosen(VLLM, FAR, "rollout.weight_folder=/nfs") == "file"


def test_the_page_about_weights_names_the_programs_that_take_each_transfer():
    page = (Path(__file__).parents[3] / "docs" / "weights.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|[^|]+\|[^|]+\|$", page.split("## Transports")[1], re.MULTILINE))
    programs = {"`headwater serve`": NATIVE, "vLLM": VLLM, "SGLang": SGLANG}
    taken = {name: backend_traits(load_config(None, [each, NEAR]).config).transfers for name, each in programs.items()}
    assert set(rows) == set(get_args(WeightTransfer))
    for transfer, named in rows.items():
        assert named.split(", ") == [name for name in programs if transfer in taken[name]], transfer


def test_the_addresses_of_this_machine_are_known():
    for host in ("127.0.0.1", "127.3.2.1", "localhost", "a.localhost", "[::1]", socket.gethostname()):
        assert is_on_this_machine(f"http://{host}:80"), host
    for host in ("10.9.8.7", "example.com", "[2001:db8::1]"):
        assert not is_on_this_machine(f"http://{host}:80"), host
