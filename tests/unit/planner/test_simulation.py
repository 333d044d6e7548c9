"""Simulated runs: the real scheduler on a virtual clock, against numbers that can be computed by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from headwater.backends.router.options import RouterOptions
from headwater.core.errors import WaitTimeout
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.planner.costs import Costs, GenerationCosts, LearnerCosts
from headwater.planner.server import SimulatedFleet, SimulatedServer
from headwater.planner.simulate import simulate
from headwater.planner.virtual_time import VirtualTasks
from headwater.planner.workload import Lengths, Workload

STEP_S = 0.01


def workload_of(length: int = 100, **settings) -> Workload:
    lengths = Lengths(np.full((1, 2), length), "test")
    base = Workload(num_prompts=4, num_samples=2, prompt_tokens=10, lengths=lengths)
    return replace(base, **settings)


def costs_of(*, train_s: float = 1.0, publish_s: float = 0.0, pause_s: float = 0.0, **generation) -> Costs:
    """A step of 840 tokens takes ``train_s``; a decode step ``STEP_S`` for any number of sequences."""
    return Costs(
        generation=GenerationCosts(step_s=STEP_S, **generation),
        learner=LearnerCosts(train_per_token_s=train_s / 840, publish_s=publish_s, pause_s=pause_s),
    )


def request(number: int, tokens: int, prompt: int = 10) -> ModelRequest:
    return ModelRequest(f"{number}#0", (prompt,), SamplingParams(tokens), rng_key=0)


def generated(server: SimulatedServer, tasks: VirtualTasks, requests: list[ModelRequest]) -> list[tuple[float, tuple]]:
    """When each request ended, and its versions with their numbers of tokens."""
    ends: dict[int, tuple[float, tuple]] = {}

    async def one(number: int) -> None:
        response = await server.generate(requests[number])
        runs = tuple(zip(response.output_versions, response.output_tokens, strict=True))
        ends[number] = tasks.loop.time(), runs

    for number in range(len(requests)):
        tasks.post(lambda number=number: tasks.loop.create_task(one(number)))
    tasks.wait(None, lambda: len(ends) == len(requests), lambda: "requests", kind="test", hard_limit_s=1e6)
    return [ends[number] for number in range(len(requests))]


def test_the_clock_jumps_and_a_wait_has_a_limit():
    began = time.monotonic()
    with VirtualTasks() as tasks:
        fired = []
        tasks.loop.call_later(3600, lambda: fired.append(tasks.loop.time()))
        tasks.sleep(3599)
        assert not fired
        tasks.sleep(2)
        assert fired == [3600.0]
        assert tasks.loop.time() == pytest.approx(3601)
        with pytest.raises(WaitTimeout, match="a miracle: not finished after 500 simulated seconds"):
            tasks.wait(None, lambda: False, lambda: "a miracle", kind="test", hard_limit_s=500)
    assert time.monotonic() - began < 600


def test_a_server_decodes_all_sequences_together():
    costs = GenerationCosts(step_s=STEP_S, step_per_sequence_s=0.005, prefill_per_token_s=0.001)
    with VirtualTasks() as tasks:
        server = SimulatedServer(tasks.loop, costs)
        ends = generated(server, tasks, [request(0, 100), request(1, 50)])
    # Two prompts of 10 tokens, 50 steps of two sequences, then 50 steps of one.
    assert ends[1][0] == pytest.approx(0.02 + 50 * 0.02)
    assert ends[0][0] == pytest.approx(0.02 + 50 * 0.02 + 50 * 0.015)


def test_a_growing_context_slows_a_server_down():
    costs = GenerationCosts(step_s=STEP_S, step_per_context_token_s=1e-4)
    with VirtualTasks() as tasks:
        [(end, _)] = generated(SimulatedServer(tasks.loop, costs), tasks, [request(0, 1000, prompt=100)])
    # The sum over steps of step_s + 1e-4 * (100 + k), up to half a token of the fluid model.
    assert end == pytest.approx(1000 * STEP_S + 1e-4 * (100 * 1000 + 1000**2 / 2))


def test_a_full_cache_lets_requests_wait_and_a_shared_prompt_is_computed_once():
    costs = GenerationCosts(step_s=STEP_S, kv_cache_tokens=120, prefill_per_token_s=0.1)
    with VirtualTasks() as tasks:
        server = SimulatedServer(tasks.loop, costs)
        same = ModelRequest("0#1", (10,), SamplingParams(40), rng_key=0)
        ends = generated(server, tasks, [request(0, 40), same, request(2, 40)])
    assert ends[0][0] == ends[1][0] == pytest.approx(1.0 + 0.4)  # one prompt, 40 steps
    assert ends[2][0] == pytest.approx(1.4 + 1.0 + 0.4)  # after the first two


def test_new_weights_divide_a_response_and_lose_no_token():
    costs = GenerationCosts(step_s=STEP_S, prefill_per_token_s=0.001)
    with VirtualTasks() as tasks:
        server = SimulatedServer(tasks.loop, costs)
        tasks.loop.call_later(0.01 + 0.305, lambda: server.update(1, pause_s=0.5, recomputes=False))
        tasks.loop.call_later(2.0, lambda: server.update(2, pause_s=0.0, recomputes=True))
        [(end, runs)] = generated(server, tasks, [request(0, 200)])
    assert runs[0] == (0, 31)  # a token that has begun belongs to the old weights
    assert [version for version, _ in runs] == [0, 1, 2]
    assert sum(count for _, count in runs) == 200
    recomputed = (10 + (2.0 - 0.01 - 0.5) / STEP_S) * 0.001
    assert end == pytest.approx(0.01 + 200 * STEP_S + 0.5 + recomputed, rel=1e-3)


def test_requests_go_to_the_least_loaded_server():
    with VirtualTasks() as tasks:
        servers = [SimulatedServer(tasks.loop, GenerationCosts(step_s=STEP_S)) for _ in range(3)]
        fleet = SimulatedFleet(servers)
        for number in range(10):
            tasks.post(lambda number=number: tasks.loop.create_task(fleet.agenerate(request(number, 10 + number))))
        tasks.sleep(0.05)
        assert sorted(each.load for each in servers) == [3, 3, 4]
        tasks.sleep(0.135)  # all but the one with 19 tokens have ended
        busy = next(each for each in servers if each.load)
        for number in range(2):
            tasks.post(lambda number=number: tasks.loop.create_task(fleet.agenerate(request(20 + number, 50))))
        tasks.sleep(0.001)
        assert busy.load == 1
        assert fleet.num_open == 3


def test_requests_wait_for_a_place_if_all_servers_are_full():
    with VirtualTasks() as tasks:
        servers = [SimulatedServer(tasks.loop, GenerationCosts(step_s=STEP_S)) for _ in range(2)]
        fleet = SimulatedFleet(servers, RouterOptions(max_open_per_server=2))
        begun = [fleet.agenerate(request(number, 10)) for number in range(10)]
        done: list[float] = []
        for each in begun:
            tasks.post(
                lambda each=each: tasks.loop.create_task(each).add_done_callback(
                    lambda _: done.append(tasks.loop.time())
                )
            )
        tasks.sleep(0.05)
        assert [server.load for server in servers] == [2, 2]
        assert fleet.num_open == 10
        tasks.sleep(1.0)
    assert done == pytest.approx([0.1] * 4 + [0.2] * 4 + [0.3] * 2)


def test_a_synchronous_step_is_the_sum_of_its_parts():
    costs = costs_of(train_s=2.0, publish_s=0.5, pause_s=0.25)
    predicted = simulate(workload_of(), costs, 1, num_steps=3)
    assert predicted.step_s == pytest.approx(100 * STEP_S + 2.0 + 0.5, rel=1e-3)  # the pause is a part of the publish
    assert predicted.tokens_per_s == pytest.approx(800 / predicted.step_s)
    assert predicted.mean_lag == predicted.max_lag == 0
    assert predicted.masked_share == 0
    assert predicted.wait_s == pytest.approx(1.0, rel=1e-3)
    assert predicted.train_s == pytest.approx(2.0, rel=1e-3)
    assert predicted.events_per_s == pytest.approx((2 * 8 + 5 * 4) / predicted.step_s)


def test_an_asynchronous_step_is_its_longest_part():
    slow_learner = simulate(workload_of(max_staleness=1), costs_of(train_s=3.0), 1)
    assert slow_learner.step_s == pytest.approx(3.0, rel=1e-2)
    assert slow_learner.wait_s < 0.01
    assert slow_learner.max_lag == 1
    assert slow_learner.server_busy == pytest.approx(1 / 3, rel=0.05)
    # Groups of one batch decode together, so a step cannot be shorter than half of the 1 s that a response takes.
    slow_server = simulate(workload_of(max_staleness=1), costs_of(train_s=0.1), 1)
    assert 0.5 <= slow_server.step_s <= 1.1
    assert slow_server.wait_s > 0.3


def test_a_publish_in_which_servers_pause_costs_the_tokens_that_they_do_not_generate():
    costs = [costs_of(train_s=0.1, publish_s=0.4, pause_s=pause_s) for pause_s in (0.0, 0.4)]
    generating, pausing = (simulate(workload_of(max_staleness=1), each, 1) for each in costs)
    # Every response waits through one pause, and responses of two steps run at the same time.
    assert pausing.step_s - generating.step_s == pytest.approx(0.4 / 2)
    idle = simulate(workload_of(), costs[1], 1, num_steps=3)
    assert idle.server_busy == pytest.approx(1.0 / 1.5, rel=1e-2)  # a pause without a sequence is not busy


def test_the_bound_of_staleness_is_that_of_the_real_buffer():
    lengths = Lengths(np.array([[10, 10]] * 7 + [[2000, 2000]]), "long tail")
    settings = {"lengths": lengths, "max_staleness": 2}
    costs = costs_of(train_s=1.0)
    masked = simulate(workload_of(**settings), costs, 1, num_steps=24)
    assert masked.max_lag <= 2
    assert masked.masked_share > 0.1
    dropped = simulate(workload_of(**settings, on_stale="drop"), costs, 1, num_steps=24)
    assert dropped.dropped_groups > 0
    assert dropped.masked_share == 0
    waited = simulate(workload_of(**settings, on_stale="wait"), costs, 1, num_steps=24)
    assert waited.masked_share == 0
    assert waited.step_s > masked.step_s


def test_modes_of_weight_updates_and_waiting_episodes():
    lengths = Lengths(np.array([[50, 100], [150, 200]]), "test")
    costs = costs_of(train_s=0.5, prefill_per_token_s=0.001)
    base = workload_of(lengths=lengths, max_staleness=1)
    steps = {mode: simulate(replace(base, update_mode=mode), costs, 1, num_steps=8).step_s
             for mode in ("in_flight", "interrupt", "drain")}  # fmt: skip
    assert steps["in_flight"] < steps["interrupt"]
    assert steps["in_flight"] < steps["drain"]
    tools = simulate(workload_of(waits_s=np.full((1, 1), 5.0)), costs_of(train_s=0.5), 1)
    assert tools.step_s == pytest.approx(6.5, rel=1e-2)


def test_the_same_input_gives_the_same_prediction():
    workload = workload_of(lengths=Lengths.long_tailed(2, 500), max_staleness=2)
    assert simulate(workload, costs_of(), 2) == simulate(workload, costs_of(), 2)
