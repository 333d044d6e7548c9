"""Tokens in, tokens out: under every template, the model reads and is trained on exactly what it wrote."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import closing

from chat.templates import CHATS, tokenizer_of
from chat.written_calls import ADD, SCHEMAS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workflows.episodes import ListedRewards
from workflows.scripted_engine import ScriptedEngine

from headwater.chat.render import encode_rendered, render_chat
from headwater.config.schema import EngineConfig
from headwater.core.protocols import EpisodeInput
from headwater.core.records import Prompt
from headwater.core.requests import Grammar, ModelResponse, SamplingParams
from headwater.core.tool_calls import ToolCall
from headwater.engine.engine import Engine
from headwater.models.load import load_tokenizer
from headwater.workflows import Episode, WorkflowContext

ROOM = 6000
ASK = ({"role": "system", "content": "Use tools."}, {"role": "user", "content": "What is 7 + 5?"})
TEXTS = ("", "12", " So\n", "<think>\nhm\n</think>\n\nOk", "a [x] {y} ", "é€", "</s", "<|im_end")
CALL_TEXTS = {
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {}}]',
    "llama3": '<|python_tag|>{"name": "add", "parameters": {}}',
    "glm": "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
}


def ask_of(name: str):
    return ASK[1:] if name == "gemma2" else ASK  # it refuses system messages


def episode_of(name: str, engine, max_new_tokens: int = ROOM) -> Episode:
    made, args = tokenizer_of(name), {**CHATS[name].args}
    ask = ask_of(name)
    text = render_chat(made, ask, {**args, "tools": SCHEMAS})
    prompt = Prompt("row", ask, text, encode_rendered(made, text), data_source="x", tool_schemas=tuple(SCHEMAS))
    context = WorkflowContext(made, ListedRewards([1.0]), SamplingParams(max_new_tokens), args)
    return Episode(context, engine, EpisodeInput(prompt, sample=0, rng_key=7))


class EndingEngine(ScriptedEngine):
    """Any special token ends a response, as several end tokens of one model do."""

    def __init__(self, answers, ends) -> None:
        super().__init__(answers, end_token=-1)
        self._ends = set(ends)

    async def agenerate(self, request) -> ModelResponse:
        response = await super().agenerate(request)
        is_ended = bool(response.output_tokens) and response.output_tokens[-1] in self._ends
        return ModelResponse(
            response.input_tokens, response.output_tokens, response.output_logprobs, response.output_versions,
            "stop" if is_ended else "length",
        )  # fmt: skip


def calls_of(count: int, turn: int) -> list[dict]:
    # A name and arguments that contain marks of templates must not end the message early.
    arguments = {"a": 1, "text": "<|im_end|></s><|eot_id|><end_of_turn>\n"}
    return [ToolCall(f"c{turn:07d}{number}", "add", arguments).as_message() for number in range(count)]


def results_of(calls, texts) -> list[dict]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": text}
        for call, text in zip(calls, itertools.cycle(texts), strict=False)
    ]


def check(episode: Episode, engine: ScriptedEngine, answers) -> None:
    """The mask selects the sampled tokens, and every request continues the one before."""
    trajectory = episode.finish(1.0)
    sampled = [token for token, mask in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if mask]
    assert sampled == [token for answer in answers for token in answer]
    expected = [
        (-0.5 - turn - 0.01 * place, turn) for turn, answer in enumerate(answers) for place in range(len(answer))
    ]
    facts = zip(trajectory.logprobs, trajectory.versions, trajectory.loss_mask, strict=True)
    assert [(logprob, version) for logprob, version, mask in facts if mask] == expected
    given_facts = zip(trajectory.logprobs, trajectory.versions, trajectory.loss_mask, strict=True)
    assert {(logprob, version) for logprob, version, mask in given_facts if not mask} == {(0.0, -1)}
    for turn, (before, after) in enumerate(itertools.pairwise(engine.requests)):
        cached = before.input_tokens + tuple(answers[turn])
        assert after.input_tokens[: len(cached)] == cached


TURN = st.tuples(
    st.sampled_from(TEXTS),
    st.lists(st.integers(6, 511), max_size=4),  # tokens that no tokenizer would choose for their text
    st.integers(0, 3),  # calls
    st.sampled_from(["end", "other end", "cut"]),
    st.lists(st.sampled_from(("12", "<|im_end|>", ' "x"\n', "é")), min_size=1, max_size=3),
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(TURN, min_size=1, max_size=4))
def test_the_mask_selects_what_was_sampled_and_requests_continue_each_other(turns):
    for name, chat in CHATS.items():
        made = tokenizer_of(name)
        ends = [made.convert_tokens_to_ids(end) for end in chat.ends]
        answers = []
        for text, tokens, num_calls, ending, _ in turns:
            written = text + "".join([CALL_TEXTS.get(name, '<tool_call>{"name": "add"}</tool_call>')] * num_calls)
            answer = [*made.encode(written, add_special_tokens=False), *tokens]
            answers.append(answer + {"end": ends[:1], "other end": ends[-1:], "cut": []}[ending] or ends[:1])
        engine = EndingEngine(answers, ends)
        episode = episode_of(name, engine)

        async def run(episode=episode, name=name, made=made) -> None:
            for turn, (_, _, num_calls, _, texts) in enumerate(turns):
                await episode.reply()
                before = len(episode.tokens)
                calls = calls_of(num_calls, turn)
                told = results_of(calls, texts) if calls else [{"role": "user", "content": texts[0]}]
                assert episode.tell(told, tool_calls=calls, content="")
                given = made.decode(episode.tokens[before:], skip_special_tokens=False)
                opening = made.decode(episode.prompt.tokens[-4:], skip_special_tokens=False)
                assert name == "mistral" or given.endswith(opening[-6:]), name  # Mistral has no opening
                for text in texts[: max(1, num_calls)]:
                    assert text.strip() in given or text.strip().replace('"', '\\"') in given, (name, given)
                assert "arguments" not in given, name
                assert "[what" not in given, name
            await episode.reply()

        engine._answers.append((ends[0],))
        asyncio.run(run())
        check(episode, engine, [*answers, [ends[0]]])


CANONICAL = [
    ({"content": "Let me add."}, [{"role": "user", "content": "Do."}]),
    ({"content": "", "calls": 1}, ["12"]),
    ({"content": "", "calls": 2}, ["12", "13"]),
    ({"content": "So: 12"}, [{"role": "user", "content": "Thanks."}]),
]
"""Replies and what follows them."""


def test_replies_in_the_words_of_the_template_make_the_text_of_the_template():
    """If a model writes what the template would write, then the episode is the rendered conversation, end to end."""
    for name in ("chatml", "qwen2.5", "llama3", "glm", "gemma"):
        made, args = tokenizer_of(name), {**CHATS[name].args, "tools": SCHEMAS}
        has_calls = name in ("qwen2.5", "glm")
        chat, answers, told = list(ASK), [], []
        for number, (reply, messages) in enumerate(CANONICAL):
            if "calls" in reply and not has_calls and (name != "llama3" or reply["calls"] > 1):
                continue
            calls = calls_of(reply.get("calls", 0), number)
            for call in calls:
                call["function"]["arguments"] = {"a": 1}
            message = {"role": "assistant", "content": reply["content"], **({"tool_calls": calls} if calls else {})}
            results = results_of(calls, messages) if calls else messages
            before = render_chat(made, chat, args)
            after = render_chat(made, [*chat, message, *results], args)
            assert after.startswith(before), name
            end = CHATS[name].ends[-1 if calls and name == "glm" else 0]
            written = after.removeprefix(before).partition(end)[0] + end
            answers.append(made.encode(written, add_special_tokens=False))
            told.append((results, calls, reply["content"]))
            chat += [message, *results]
        engine = EndingEngine([*answers, [5]], [made.convert_tokens_to_ids(end) for end in CHATS[name].ends])
        episode = episode_of(name, engine)

        async def run(episode=episode, told=told) -> None:
            for results, calls, content in told:
                await episode.reply()
                assert episode.tell(results, tool_calls=calls, content=content)

        asyncio.run(run())
        assert made.decode(episode.tokens, skip_special_tokens=False) == render_chat(made, chat, args), name


def test_results_become_a_user_message_where_the_template_has_no_tools():
    made = tokenizer_of("gemma")
    end = made.convert_tokens_to_ids("<end_of_turn>")
    engine = EndingEngine([[40, end], [41, end]], [end])
    episode = episode_of("gemma", engine)

    async def run() -> None:
        for turn in range(2):
            await episode.reply()
            calls = calls_of(2, turn)
            assert episode.tell(results_of(calls, ["12", "13"]), tool_calls=calls, content="")

    asyncio.run(run())
    text = made.decode(episode.tokens, skip_special_tokens=False)
    assert text.count("<start_of_turn>user\n12\n13<end_of_turn>\n<start_of_turn>model\n") == 2
    assert [message["role"] for message in episode.messages] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert len(episode.messages[2]["tool_calls"]) == 2


def test_another_end_token_than_the_templates_is_not_closed_twice():
    made = tokenizer_of("llama3")
    eom, eot = (made.convert_tokens_to_ids(each) for each in ("<|eom_id|>", "<|eot_id|>"))
    for answer, expected in (([40, eom], ""), ([40, eot], ""), ([40], "<|eot_id|>")):
        episode = episode_of("llama3", EndingEngine([answer], [eom, eot]))
        asyncio.run(episode.reply())
        before = len(episode.tokens)
        assert episode.tell(results_of(calls_of(1, 0), ["12"]), tool_calls=calls_of(1, 0))
        given = made.decode(episode.tokens[before:], skip_special_tokens=False)
        assert given.startswith(f"{expected}<|start_header_id|>ipython<|end_header_id|>"), given


def test_a_reply_knows_whether_it_begins_in_reasoning():
    made = tokenizer_of("qwen3")
    for ending, expected in (("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)):
        text = render_chat(made, ASK) + ending
        prompt = Prompt("row", ASK, text, encode_rendered(made, text), data_source="x")
        context = WorkflowContext(made, ListedRewards([]), SamplingParams(8))
        episode = Episode(context, EndingEngine([[40]], []), EpisodeInput(prompt, sample=0, rng_key=7))
        asyncio.run(episode.reply())
        assert episode.begins_in_reasoning is expected


def test_the_real_engine_has_cached_the_prefix_of_the_next_turn():
    """All complete pages of what the model read and wrote before are found in the cache."""
    made, page = load_tokenizer("tiny:qwen3"), 16
    with closing(Engine.load("tiny:qwen3", EngineConfig(page_tokens=page), tokenizer=made, device="cpu")) as engine:
        for number, (name, chat) in enumerate(CHATS.items()):
            made.chat_template = chat.template.replace(chat.ends[0], "<|end|>")
            text = render_chat(made, ask_of(name), {**chat.args, "tools": [ADD]})
            prompt = Prompt(name, ask_of(name), text, encode_rendered(made, text), data_source="x", tool_schemas=(ADD,))
            # A reply that ends by itself, because the engine does not keep one that reached its limit.
            sampling = SamplingParams(1200, grammar=Grammar("regex", "[a-z]{18}"))
            context = WorkflowContext(made, ListedRewards([1.0]), sampling, chat.args)
            episode = Episode(context, engine, EpisodeInput(prompt, sample=0, rng_key=number))

            async def run(episode=episode, name=name) -> None:
                before = 0
                for turn in range(3):
                    known = len(episode.tokens)
                    cached = engine.metrics().num_tokens_cached
                    await episode.reply()
                    assert episode.stop_reason == "stop"
                    if turn:
                        # The last token that was sampled has not been read by the model yet.
                        expected = (before - 1) // page * page
                        assert engine.metrics().num_tokens_cached - cached == expected, name
                    before = len(episode.tokens)
                    assert before > known
                    calls = calls_of(1 + turn % 2, turn)
                    assert episode.tell(results_of(calls, ["12"]), tool_calls=calls, content="")

            asyncio.run(run())
            trajectory = episode.finish(1.0)
            assert sum(trajectory.loss_mask) == sum(version >= 0 for version in trajectory.versions) > 0
