"""New weights under a running engine: which token is of which weights, and what is refused."""

from __future__ import annotations

import threading

import pytest
import torch
from engine.engine_parts import (
    LIMIT_S,
    VOCABULARY,
    assert_nothing_is_held,
    assert_same,
    bits,
    build,
    full_pass,
    gib_of,
    late_token,
    make_model,
    reference,
    request,
    running,
    stepped,
    texts,
    tokens_of,
    weights,
)
from safetensors.torch import save, save_file
from tiny import tokenizer

from headwater.config.schema import EngineConfig
from headwater.core.errors import LogitsBroken, RolloutFailed, WeightsError, WeightsIncomplete
from headwater.core.protocols import WeightUpdate
from headwater.engine.engine import Engine
from headwater.weights.memory import Receiver

GREEDY = request(tokens_of(9), 1, "greedy", max_new_tokens=40, temperature=0.0)
REQUESTS = [request(tokens_of(9), key, max_new_tokens=40) for key in range(3)]
MODES = ("interrupt", "in_flight", "drain")


@pytest.fixture(scope="module")
def old():
    with running() as engine:
        return engine.generate([GREEDY])[0]


@pytest.fixture(scope="module")
def new():
    with running(make_model(seed=1)) as engine:
        return engine.generate([GREEDY])[0]


def test_the_two_weight_sets_say_different_things(old, new):
    assert old.output_tokens[:3] != new.output_tokens[:3]


# Modes


@pytest.mark.parametrize("gpu_like", [False, True])
@pytest.mark.parametrize("mode", ["interrupt", "in_flight"])
def test_versions_change_exactly_at_the_update_and_no_token_is_lost(mode, gpu_like):
    with stepped(gpu_like=gpu_like, decode_steps=4) as slow:
        streams = [slow.stream(each) for each in REQUESTS]
        slow.turn(3)
        update = slow.engine.update_weights(weights(1, 7), mode)
        slow.engine._loop.call(lambda: drawn.append(slow.engine.metrics().num_tokens_generated))
        drawn: list[int] = []
        slow.turn()
        assert update.done()
        slow.finish()
        responses = [answer.result(LIMIT_S) for _, answer in streams]
    # As many tokens are of the old weights as had been drawn when the new ones came.
    assert sum(each.output_versions.count(0) for each in responses) == drawn[0] > 0
    for response in responses:
        assert len(response.output_tokens) == 40
        assert set(response.output_versions) == {0, 7}
        assert list(response.output_versions) == sorted(response.output_versions)


def test_in_flight_keeps_the_cache_and_computes_no_prompt_again():
    with stepped(decode_steps=4) as slow:
        answers = [slow.submit(each) for each in REQUESTS]
        slow.turn(3)
        computed = slow.engine.metrics().num_tokens_prefilled
        slow.engine.update_weights(weights(1, 1), "in_flight")
        slow.finish()
        assert slow.engine.metrics().num_tokens_prefilled == computed == 9
        assert all(set(each.result(LIMIT_S).output_versions) == {0, 1} for each in answers)


def test_in_flight_goes_on_with_the_new_weights_over_the_old_cache(old):
    """The first token after the swap: new weights, keys and values of the old ones."""
    with stepped(decode_steps=4) as slow:
        answer = slow.submit(GREEDY)
        slow.turn(3)
        slow.engine.update_weights(weights(1, 1), "in_flight")
        slow.finish()
        response = answer.result(LIMIT_S)
    count = response.output_versions.index(1)
    everything = (*response.input_tokens, *response.output_tokens)
    fed = len(response.input_tokens) + count - 1  # tokens whose keys and values are of the old weights
    with torch.no_grad():
        cache = reference(seed=0)(torch.tensor([everything[:fed]]), use_cache=True).past_key_values
        logits = reference(seed=1)(torch.tensor([everything[fed:-1]]), past_key_values=cache).logits[0]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(everything[fed + 1 :])[:, None])[:, 0]
    assert response.output_tokens[:count] == old.output_tokens[:count]
    assert response.output_logprobs[count:] == pytest.approx(expected.tolist(), abs=1e-4)


def test_after_an_interruption_the_rest_is_what_a_fresh_engine_makes_of_prompt_and_partial_output(old):
    with stepped(decode_steps=4) as slow:
        answer = slow.submit(GREEDY)
        slow.turn(3)
        before = slow.engine.metrics()
        slow.engine.update_weights(weights(1, 1), "interrupt")
        slow.finish()
        response = answer.result(LIMIT_S)
        after = slow.engine.metrics()
    count = response.output_versions.index(1)
    assert 0 < count < 40
    assert response.output_tokens[:count] == old.output_tokens[:count]
    assert after.num_interrupted == 1
    assert after.num_tokens_prefilled - before.num_tokens_prefilled == 9 + count
    with running(make_model(seed=1)) as engine:
        prompt = (*GREEDY.input_tokens, *response.output_tokens[:count])
        [rest] = engine.generate([request(prompt, max_new_tokens=40 - count, temperature=0.0)])
    assert response.output_tokens[count:] == rest.output_tokens
    assert response.output_logprobs[count:] == pytest.approx(rest.output_logprobs, abs=1e-4)


def test_a_sampled_response_goes_on_at_its_place_in_the_random_sequence():
    """Token p of a response uses the p-th number of its key, whatever interrupted it before."""
    with stepped(decode_steps=4) as slow:
        answer = slow.submit(REQUESTS[0])
        slow.turn(3)
        slow.engine.update_weights(weights(1, 1), "interrupt")
        slow.turn(2)
        slow.engine.update_weights(weights(0, 2), "interrupt")
        slow.finish()
        response = answer.result(LIMIT_S)
    for seed, version in ((0, 0), (1, 1), (0, 2)):
        expected = full_pass(reference(seed=seed), response, REQUESTS[0].sampling)
        for ours, theirs, tag in zip(response.output_logprobs, expected, response.output_versions, strict=True):
            if tag == version:
                assert ours == pytest.approx(theirs, abs=1e-4)
    assert set(response.output_versions) == {0, 1, 2}


@pytest.mark.parametrize("paused", [False, True])
def test_drain_ends_what_runs_under_the_old_weights_and_starts_what_waits_under_the_new(paused):
    with stepped(max_sequences=2, decode_steps=4) as slow:
        running_ones = [slow.submit(each) for each in REQUESTS[:2]]
        slow.turn(2)
        if paused:
            slow.call(slow.engine.pause)
        waiting = [slow.submit(REQUESTS[2]), slow.submit(GREEDY)]
        update = slow.engine.update_weights(weights(1, 1), "drain")
        for _ in range(30):
            slow.turn()
        assert update.done()
        if paused:
            assert slow.engine.is_paused
            assert slow.engine.metrics().num_waiting == 2
            slow.call(slow.engine.resume)
        slow.finish()
        assert [set(each.result(LIMIT_S).output_versions) for each in running_ones] == [{0}, {0}]
        assert [set(each.result(LIMIT_S).output_versions) for each in waiting] == [{1}, {1}]
        assert [len(each.result(LIMIT_S).output_tokens) for each in (*running_ones, *waiting)] == [40] * 4


def test_drain_ends_what_runs_under_the_old_weights_even_where_it_must_make_room():
    """Two that do not fit together: the one that gives way is running too, and the update must wait for it."""
    with stepped(num_pages=11, decode_steps=2) as slow:
        answers = [slow.submit(request(tokens_of(9, key), key, max_new_tokens=25)) for key in range(2)]
        slow.turn(3)
        assert slow.engine.metrics().num_running == 2
        slow.engine.update_weights(weights(1, 1), "drain")
        slow.finish()
        assert slow.engine.metrics().num_preempted > 0
        assert [set(each.result(LIMIT_S).output_versions) for each in answers] == [{0}, {0}]


def test_drain_with_nothing_running_happens_at_once(new):
    with running() as engine:
        engine.update_weights(weights(1, 1), "drain").result(LIMIT_S)
        assert_same(engine.generate([GREEDY]), [new])


@pytest.mark.parametrize("mode", ["interrupt", "in_flight", "drain"])
def test_an_update_asked_for_later_is_never_undone_by_one_that_waited_for_a_drain(mode, new):
    with stepped(decode_steps=4) as slow:
        answer = slow.submit(REQUESTS[0])
        slow.turn(2)
        first = slow.engine.update_weights(weights(0, 1), "drain")
        slow.turn()
        second = slow.engine.update_weights(weights(1, 2), mode)
        slow.finish()
        assert first.done()
        assert second.done()
        assert slow.engine.get_version() == 2
        after = slow.submit(GREEDY)
        slow.finish()
        assert texts([after.result(LIMIT_S)]) == texts([new])
        versions = list(answer.result(LIMIT_S).output_versions)
        assert versions == sorted(versions)


@pytest.mark.parametrize("mode", MODES)
def test_an_update_while_paused_is_taken_and_generation_stays_paused(mode, new):
    with stepped() as slow:
        slow.call(slow.engine.pause)
        update = slow.engine.update_weights(weights(1, 1), mode)
        answer = slow.submit(GREEDY)
        slow.turn(3)
        assert update.done()
        assert not answer.done()
        slow.call(slow.engine.resume)
        slow.finish()
        assert_same([answer.result(LIMIT_S)], [new])


def test_the_configured_mode_is_the_default():
    for mode, interrupted in (("interrupt", 1), ("in_flight", 0)):
        with stepped(update_mode=mode) as slow:
            slow.submit(GREEDY)
            slow.turn(2)
            slow.engine.update_weights(weights(1, 1))
            slow.turn()
            assert slow.engine.metrics().num_interrupted == interrupted
            slow.finish()


def test_an_interruption_while_a_prompt_is_half_computed_computes_it_anew(new):
    with stepped(max_prefill_tokens=1) as slow:
        prompt = tokens_of(60)
        answer = slow.submit(request(prompt, temperature=0.0))
        slow.turn()
        assert 0 < slow.engine.metrics().num_tokens_prefilled < 60
        slow.engine.update_weights(weights(1, 1), "interrupt")
        slow.finish()
        response = answer.result(LIMIT_S)
    assert set(response.output_versions) == {1}
    expected = full_pass(reference(seed=1), response, request(prompt, temperature=0.0).sampling)
    assert response.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_a_response_that_ends_in_the_round_before_the_update_ends_with_its_own_reason():
    """Its budget is used up at the interruption: length, not abort, and nothing of the new weights."""
    with stepped(decode_steps=4) as slow:
        answer = slow.submit(request(tokens_of(9), max_new_tokens=5))
        slow.turn()
        slow.engine.update_weights(weights(1, 1), "interrupt")
        slow.finish()
        response = answer.result(LIMIT_S)
    assert (response.stop_reason, len(response.output_tokens), set(response.output_versions)) == ("length", 5, {0})


def test_nothing_computed_by_older_weights_is_reused():
    """Not even under the same version number."""
    prompt = tokens_of(50)
    with running() as engine:
        engine.generate([request(prompt)])
        for seed, mode in ((1, "interrupt"), (0, "in_flight"), (1, "drain")):
            engine.update_weights(weights(seed, 1), mode).result(LIMIT_S)
            before = engine.metrics().num_tokens_cached
            [response] = engine.generate([request(prompt)])
            assert engine.metrics().num_tokens_cached == before
            expected = full_pass(reference(seed=seed), response, request(prompt).sampling)
            assert response.output_logprobs == pytest.approx(expected, abs=1e-4), mode


@pytest.mark.parametrize("version", [0, 1])
def test_nothing_of_a_response_that_saw_two_weights_is_reused(version):
    """Its pages are filled by both; a prompt that repeats it must be computed afresh, whatever its version."""

    def updated_half_way(slow, **sampling):
        answer = slow.submit(request(tokens_of(9), max_new_tokens=40, **sampling))
        slow.turn(3)
        slow.engine.update_weights(weights(1, version), "in_flight")
        slow.finish()
        return answer.result(LIMIT_S)

    with stepped(page_tokens=4, decode_steps=4) as slow:
        stop, _ = late_token(updated_half_way(slow).output_tokens, 25)
    with stepped(page_tokens=4, decode_steps=4) as slow:
        answer = updated_half_way(slow, stop_token_ids=(stop,))
        assert answer.stop_reason == "stop"
        following = request((*tokens_of(9), *answer.output_tokens))
        again = slow.submit(following)
        slow.finish()
        response = again.result(LIMIT_S)
        assert slow.engine.metrics().num_tokens_cached == 0
    expected = full_pass(reference(seed=1), response, following.sampling)
    assert response.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_set_version_renames_the_weights_and_loses_nothing(old):
    with stepped(decode_steps=4) as slow:
        answer = slow.submit(GREEDY)
        slow.turn(2)
        slow.call(lambda: slow.engine.set_version(12))
        slow.finish()
        response = answer.result(LIMIT_S)
        assert slow.engine.get_version() == 12
    assert_same([response], [old])
    assert set(response.output_versions) == {0, 12}


# Refusals


def spoiled(how):
    update = {name: tensor.detach().clone() for name, tensor in reference(seed=1).named_parameters()}
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "missing":
        del update[name]
    elif how == "extra":
        update["model.extra"] = torch.zeros(1)
    elif how == "whole numbers":
        update[name] = update[name].long()
    elif how == "an array":
        update[name] = update[name].numpy()
    elif how == "without values":
        update[name] = update[name].to("meta")
    elif how == "the other name's shape":
        update["lm_head.weight"] = torch.full((7, 3), torch.nan)
    elif how == "the other name's values":
        update["lm_head.weight"] = update["model.embed_tokens.weight"] + 1
    elif how == "shape":
        update[name] = update[name][:-1]
    return update


REFUSALS = {
    "missing": "missing model.layers.1.mlp.up_proj.weight",
    "extra": "unknown model.extra",
    "shape": r"has shape \(63, 32\), expected \(64, 32\)",
    "the other name's shape": r"lm_head.weight has shape \(7, 3\), expected",
    "an array": "up_proj.weight is not a tensor with values in memory",
    "without values": "up_proj.weight is not a tensor with values in memory",
    "the other name's values": "lm_head.weight differs from model.embed_tokens.weight",
    "whole numbers": "up_proj.weight is torch.int64",
}


def test_an_update_that_fails_before_a_weight_is_changed_leaves_the_old_ones_in_use(old):
    with stepped() as slow:
        answer = slow.submit(GREEDY)
        slow.turn(2)
        for number, (how, message) in enumerate(REFUSALS.items()):
            mode = ("interrupt", "in_flight")[number % 2]
            update = slow.engine.update_weights(WeightUpdate.of(1, spoiled(how).items()), mode)
            slow.turn()
            with pytest.raises(WeightsError, match=f"the old weights stay in place: .*{message}"):
                update.result(LIMIT_S)
        twice = spoiled("not at all")
        update = slow.engine.update_weights(WeightUpdate.of(1, [*twice.items(), next(iter(twice.items()))]))
        slow.finish()
        with pytest.raises(WeightsError, match=r"model.embed_tokens.weight is given twice"):
            update.result(LIMIT_S)
        assert_same([answer.result(LIMIT_S)], [old])
        assert set(answer.result(LIMIT_S).output_versions) == {0}
        assert (slow.engine.get_version(), slow.engine.status().needs_weights) == (0, False)


def test_values_that_the_engine_cannot_hold_are_refused():
    model = build(make_model().config).to(torch.float16)
    update = {name: tensor.detach().float() for name, tensor in model.named_parameters()}
    update["model.norm.weight"][0] = 1e5
    stream = WeightUpdate.of(1, update.items())
    message = r"model.norm.weight holds values that are NaN or infinite as torch.float16"
    with pytest.raises(WeightsIncomplete, match=message):
        Receiver(model, stream.shapes).take_all(stream)


def in_pieces(how="well", seed=1):
    """One tensor per bucket, the third of them broken; closed says whether the stream was closed or read to its end."""
    update = {name: tensor.detach().clone() for name, tensor in reference(seed=seed).named_parameters()}
    closed = []

    def buckets():
        try:
            for number, (name, tensor) in enumerate(update.items()):
                if number == 2 and how == "raises":
                    raise OSError("the disk is gone")
                if number == 2 and how == "unannounced":
                    yield [("model.extra", tensor)]
                if number == 2 and how in ("not a number", "infinite"):
                    tensor[..., 0] = torch.nan if how == "not a number" else -torch.inf
                if number == 2 and how == "ends":
                    return
                yield [(name, tensor)]
        finally:
            closed.append(True)

    return WeightUpdate(1, {name: tuple(tensor.shape) for name, tensor in update.items()}, buckets()), closed


@pytest.mark.parametrize("mode", MODES)
def test_after_a_stream_that_fails_midway_nothing_is_generated_until_a_complete_one(mode, new):
    failures = {
        "raises": "OSError: the disk is gone",
        "unannounced": "model.extra was not announced",
        "not a number": "NaN or infinite as torch.float32",
        "infinite": "NaN or infinite as torch.float32",
        "ends": "did not arrive",
    }
    with stepped(decode_steps=4) as slow:
        running_one = slow.submit(GREEDY)
        slow.turn(2)
        for how, message in failures.items():
            stream, closed = in_pieces(how)
            update = slow.engine.update_weights(stream, mode)
            for _ in range(60):  # a drain waits for the running request
                if not update.done():
                    slow.turn()
            with pytest.raises(WeightsIncomplete, match=f"of .* tensors.*generates nothing.*{message}"):
                update.result(LIMIT_S)
            assert closed, "the sender is told that the stream has ended"
            assert slow.engine.status().needs_weights, how
            assert slow.engine.get_version() == 0
        drawn = slow.engine.metrics().num_tokens_generated
        waiting = slow.submit(GREEDY)
        slow.turn(3)
        slow.settle()
        assert slow.engine.metrics().num_tokens_generated == drawn
        with pytest.raises(WeightsIncomplete, match="parts of two versions"):
            slow.engine.weights_checksum()
        better = slow.engine.update_weights(in_pieces("well")[0], mode)
        slow.finish()
        better.result(LIMIT_S)
        assert_same([waiting.result(LIMIT_S)], [new])
        assert len(running_one.result(LIMIT_S).output_tokens) == 40, "requests are kept"
        assert not slow.engine.status().needs_weights


@pytest.mark.parametrize("gpu_like", [False, True])
def test_requests_fail_under_weights_that_make_nan_and_the_engine_takes_better_ones(gpu_like, new):
    huge = {name: tensor.detach().clone() for name, tensor in reference().named_parameters()}
    huge["model.embed_tokens.weight"] *= 1000  # each is finite, and so is every state before the last product
    huge["model.norm.weight"].fill_(1e37)
    with stepped(gpu_like=gpu_like) as slow:
        answer, (_, streamed) = slow.submit(GREEDY), slow.stream(GREEDY)
        slow.turn(2)
        update = slow.engine.update_weights(WeightUpdate.of(7, huge.items()), "interrupt")
        slow.finish()
        update.result(LIMIT_S)
        for each in (answer, streamed):
            with pytest.raises(LogitsBroken, match=r"weights of version 7 produced NaN or infinite logits"):
                each.result(LIMIT_S)
        assert slow.engine.metrics().num_failed == 2
        better = slow.engine.update_weights(weights(1, 8))
        slow.turn()
        better.result(LIMIT_S)
        again = slow.submit(GREEDY)
        slow.finish()
        assert_same([again.result(LIMIT_S)], [new])
        assert_nothing_is_held(slow.engine)


@pytest.mark.parametrize(("gpu_like", "deterministic"), [(False, True), (True, False)])
def test_nan_that_bad_weights_left_in_the_cache_reaches_nobody_under_better_ones(gpu_like, deterministic):
    asked = [request(tokens_of(length), key) for key, length in enumerate((5, 6, 9, 13))]
    with running(num_pages=24, page_tokens=4, deterministic=deterministic) as engine:
        expected = engine.generate(asked)
    huge = {name: tensor.detach().clone() for name, tensor in reference().named_parameters()}
    for name in huge:
        if "layers.0.mlp" in name:
            huge[name] *= 1e25  # the next layer's keys and values are NaN
    with stepped(gpu_like=gpu_like, num_pages=24, page_tokens=4, deterministic=deterministic) as slow:
        update = slow.engine.update_weights(WeightUpdate.of(1, huge.items()))
        slow.turn()
        update.result(LIMIT_S)
        answers = [slow.submit(request(tokens_of(25), key, max_new_tokens=16)) for key in range(3)]
        slow.finish()
        for each in answers:
            with pytest.raises(LogitsBroken):
                each.result(LIMIT_S)
        storage = slow.engine._runner.cache._storage
        assert storage[1].isnan().sum() > storage[1].numel() / 4, "pages that are handed out again hold NaN"
        better = slow.engine.update_weights(weights(0, 2))
        slow.turn()
        better.result(LIMIT_S)
        healthy = [slow.submit(each) for each in asked]
        slow.finish()
        responses = [each.result(LIMIT_S) for each in healthy]
    assert_same(responses, expected)
    if deterministic:
        assert bits(responses) == bits(expected)


@pytest.mark.parametrize(("gpu_like", "deterministic"), [(False, True), (True, False)])
def test_a_prompt_that_makes_nan_fails_alone(gpu_like, deterministic):
    start = tokens_of(9)
    asked = [request((*start, *tokens_of(4, key)), key, max_new_tokens=12) for key in range(4)]
    settings = {"num_pages": 60, "page_tokens": 4, "deterministic": deterministic}
    with running(make_model("llama"), **settings) as engine:
        alone = [engine.generate([each])[0] for each in asked]
    known = {token for each in alone for token in (*each.input_tokens, *each.output_tokens)}
    # Not one of the first either: the deterministic runner tries those at its start.
    poison = next(token for token in range(64, VOCABULARY) if token not in known)
    model = make_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    with stepped(model, gpu_like=gpu_like, **settings) as slow:
        for _ in range(2):
            # It starts as the others do: what it computes of that may be found by them.
            bad = [slow.submit(request((*start, *[poison] * 9), 100 + key)) for key in range(2)]
            good = [slow.submit(each) for each in asked]
            slow.finish()
            for each in bad:
                with pytest.raises(LogitsBroken):
                    each.result(LIMIT_S)
            responses = [each.result(LIMIT_S) for each in good]
            assert_same(responses, alone)
            if deterministic:
                assert bits(responses) == bits(alone)


def test_an_unknown_mode_is_refused_by_name(old):
    with running() as engine:
        update = engine.update_weights(weights(1, 1), "gently")
        with pytest.raises(WeightsError, match=r"'gently'.*interrupt, in_flight or drain"):
            update.result(LIMIT_S)
        assert_same(engine.generate([GREEDY]), [old])


def test_a_version_that_a_token_cannot_carry_is_refused(old):
    with running() as engine:
        for version in (-1, 2**31, 2**70, 1.5):
            message = rf"version = {version}: must be an int in 0..2147483647"
            with pytest.raises(WeightsError, match=message):
                engine.update_weights(weights(1, version)).result(LIMIT_S)
            with pytest.raises(WeightsError, match=message):
                engine.set_version(version)
        assert engine.get_version() == 0
        assert_same(engine.generate([GREEDY]), [old])


def test_the_largest_version_is_carried_by_every_token(new):
    with running() as engine:
        engine.update_weights(weights(1, 2**31 - 1)).result(LIMIT_S)
        [response] = engine.generate([GREEDY])
    assert_same([response], [new])
    assert set(response.output_versions) == {2**31 - 1}


def test_a_refused_update_is_a_failed_future_also_when_the_engine_is_closed():
    with running() as engine:
        engine.close()
        with pytest.raises(RolloutFailed, match="closed"):
            engine.update_weights(weights(1, 1)).result(LIMIT_S)


def test_tied_weights_may_come_under_either_name(new):
    update = dict(reference(seed=1).named_parameters())
    update["lm_head.weight"] = update.pop("model.embed_tokens.weight")
    with running() as engine:
        engine.update_weights(WeightUpdate.of(1, update.items())).result(LIMIT_S)
        assert_same(engine.generate([GREEDY]), [new])


def test_weights_of_another_dtype_are_converted():
    update = [(name, tensor.detach().to(torch.bfloat16)) for name, tensor in reference(seed=1).named_parameters()]
    with running() as engine:
        engine.update_weights(WeightUpdate.of(1, update)).result(LIMIT_S)
        [response] = engine.generate([GREEDY])
    rounded = make_model(seed=1)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    expected = full_pass(rounded, response, GREEDY.sampling)
    assert response.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_the_caller_may_change_its_tensors_once_the_update_is_done(new):
    update = [(name, tensor.detach().clone()) for name, tensor in reference(seed=1).named_parameters()]
    with running() as engine:
        engine.update_weights(WeightUpdate.of(1, update)).result(LIMIT_S)
        for _, tensor in update:
            tensor.zero_()
        assert_same(engine.generate([GREEDY]), [new])


# Files


def named(seed=1):
    return {name: tensor.detach().contiguous() for name, tensor in reference(seed=seed).named_parameters()}


def test_weights_from_a_file(tmp_path, new):
    save_file(named(), tmp_path / "weights.safetensors")
    with running() as engine:
        engine.update_weights_from_file(str(tmp_path / "weights.safetensors"), 3).result(LIMIT_S)
        assert engine.get_version() == 3
        assert_same(engine.generate([GREEDY]), [new])


def test_weights_from_a_folder_that_transformers_saved_in_parts(tmp_path, new):
    make_model(seed=1).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with running() as engine:
        engine.update_weights_from_file(str(tmp_path), 1, "in_flight").result(LIMIT_S)
        assert_same(engine.generate([GREEDY]), [new])


def test_a_file_that_cannot_be_used_changes_nothing(tmp_path, old):
    image = save(named())
    files = {"cut": image[: len(image) // 2], "garbage": b"\x00garbage" * 99, "empty": b"", "missing": None}
    files["not a number"] = save({**named(), "model.norm.weight": torch.full((32,), torch.nan)})
    (tmp_path / "empty folder").mkdir()
    with running() as engine:
        for name, contents in files.items():
            if contents is not None:
                (tmp_path / name).write_bytes(contents)
        for name in (*files, "empty folder"):
            message = "NaN" if name == "not a number" else str(tmp_path / name)
            with pytest.raises(WeightsError, match=message):
                engine.update_weights_from_file(str(tmp_path / name), 1).result(LIMIT_S)
        assert (engine.get_version(), engine.status().needs_weights) == (0, False)
        assert_same(engine.generate([GREEDY]), [old])


# Sleeping

TAGS = [("kv_cache",), ("weights",), ("kv_cache", "weights")]


@pytest.mark.parametrize(("tags", "gpu_like"), zip(TAGS, (False, True, True), strict=True))
def test_requests_sleep_and_go_on_where_they_were(tags, gpu_like, old):
    with stepped(gpu_like=gpu_like, decode_steps=4) as slow:
        streamed, answer = slow.stream(GREEDY)
        others = [slow.submit(each) for each in REQUESTS]
        slow.turn(3)
        slow.call(lambda: slow.engine.sleep(tags))
        slow.settle()
        before = streamed.tokens
        late = slow.submit(request(tokens_of(4)))
        slow.turn(3)
        slow.settle()
        assert 0 < len(before) < 40
        assert streamed.tokens == before
        assert slow.engine.metrics().is_asleep
        slow.call(lambda: slow.engine.wake(tags))
        slow.finish()
        assert not slow.engine.metrics().is_asleep
        assert_same([answer.result(LIMIT_S)], [old])
        assert [len(each.result(LIMIT_S).output_tokens) for each in (*others, late)] == [40, 40, 40, 12]
        assert_nothing_is_held(slow.engine)


def test_sleeping_gives_the_memory_of_the_cache_back_and_waking_takes_it_again():
    with running(kv_cache_gib=0.001) as engine:
        before = engine._runner.cache._storage.untyped_storage().nbytes()
        assert before > 0.9 * 0.001 * 2**30
        engine.sleep(["weights"])
        assert engine._runner.cache._storage.untyped_storage().nbytes() == before
        engine.sleep(["kv_cache"])
        assert engine._runner.cache._storage.untyped_storage().nbytes() == 0
        engine.wake()
        assert engine._runner.cache._storage.untyped_storage().nbytes() == before


def test_generation_goes_on_only_once_nothing_sleeps(old):
    with stepped() as slow:
        answer = slow.submit(GREEDY)
        slow.call(slow.engine.sleep)
        slow.call(lambda: slow.engine.wake(["kv_cache"]))
        slow.turn(3)
        slow.settle()
        assert slow.engine.metrics().is_asleep
        assert not answer.done()
        slow.call(lambda: slow.engine.wake(["weights"]))
        slow.finish()
        assert_same([answer.result(LIMIT_S)], [old])


def test_sleeping_and_waking_twice_is_the_same_as_once(old):
    with running() as engine:
        engine.wake()
        for tags in (["kv_cache"], ["kv_cache"], ["weights"], ["kv_cache", "weights"]):
            engine.sleep(tags)
        engine.wake()
        engine.wake()
        assert_same(engine.generate([GREEDY]), [old])


def test_an_update_while_the_weights_sleep_is_refused_and_they_wake_as_they_were(old):
    with running() as engine:
        engine.sleep(["weights"])
        for mode in MODES:
            with pytest.raises(WeightsError, match="asleep"):
                engine.update_weights(weights(1, 1), mode).result(LIMIT_S)
        engine.wake(["weights"])
        assert engine.get_version() == 0
        assert_same(engine.generate([GREEDY]), [old])


def test_an_update_while_only_the_cache_sleeps_is_taken(new):
    with running() as engine:
        engine.sleep(["kv_cache"])
        engine.update_weights(weights(1, 1)).result(LIMIT_S)
        engine.wake(["kv_cache"])
        assert_same(engine.generate([GREEDY]), [new])


def test_what_the_cache_held_before_it_slept_is_not_looked_for(old):
    prompt = tokens_of(50)
    with running() as engine:
        first = engine.generate([request(prompt)])
        engine.sleep(["kv_cache"])
        engine.wake(["kv_cache"])
        cached = engine.metrics().num_tokens_cached
        assert_same(engine.generate([request(prompt)]), first)
        assert engine.metrics().num_tokens_cached == cached


def test_a_model_loaded_from_a_folder_can_sleep(tmp_path, old):
    """Its weights may lie in memory that was mapped from the file."""
    make_model().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    config = EngineConfig(kv_cache_gib=gib_of(make_model(), 64, 16))
    engine = Engine.load(str(tmp_path), config, device="cpu")
    try:
        engine.sleep()
        engine.wake()
        assert_same(engine.generate([GREEDY]), [old])
    finally:
        engine.close()


def test_a_sleeping_engine_answers_control_calls(old):
    with stepped() as slow:
        answer = slow.submit(GREEDY)
        slow.turn(2)
        slow.call(slow.engine.sleep)
        slow.call(slow.engine.pause)
        slow.call(slow.engine.resume)
        assert slow.call(lambda: slow.engine.abort("greedy"))
        response = answer.result(LIMIT_S)
        assert response.output_tokens == old.output_tokens[: len(response.output_tokens)]
        assert response.stop_reason == "abort"
        assert_nothing_is_held(slow.engine)


def test_updates_from_many_threads_leave_one_of_them_whole():
    """Weights are never a mixture: the engine ends up with exactly one of the sets that were sent."""
    updates = [weights(seed, seed) for seed in (1, 2, 3, 4)]
    with running() as engine:
        threads = [
            threading.Thread(target=lambda update=update: engine.update_weights(update).result(LIMIT_S))
            for update in updates
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        version = engine.get_version()
        [response] = engine.generate([GREEDY])
    expected = full_pass(reference(seed=version), response, GREEDY.sampling)
    assert response.output_logprobs == pytest.approx(expected, abs=1e-4)
