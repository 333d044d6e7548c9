"""The tokens between two turns, under templates that end a message in different ways."""

from __future__ import annotations

import pytest
import tiny

from headwater.chat.next_turn import next_turn
from headwater.chat.render import MODEL_TURN
from headwater.core.errors import RolloutFailed
from headwater.models.builtin.chat_template import CHATML_TEMPLATE
from headwater.models.load import load_tokenizer

END = 1
USER = {"role": "user", "content": "What is 1+1?"}
AGAIN = {"role": "user", "content": "Again."}


def tokenizer(template: str):
    made = load_tokenizer("tiny:qwen3")
    made.chat_template = template
    return made


def follows(template: str, response: str, chat=(USER, MODEL_TURN, AGAIN)) -> str:
    made = tokenizer(template)
    written = made.encode(response, add_special_tokens=False)
    return made.decode(next_turn(made, chat, written).tokens)


TINY = tiny.tokenizer().chat_template
CHATML = CHATML_TEMPLATE.replace("<|im_end|>", "<|end|>")
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
    "{% else %} {{ m.content }} <|end|>{% endif %}{% endfor %}"
)
OPEN_ENDED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
USER_ENDED = "{% for m in messages %}{{ m.content }}{{ '<|end|>' if m.role == 'user' }}{% endfor %}"


ENDINGS = [
    (TINY, "3<|end|>", "<|user|>Again.<|end|><|assistant|>"),
    (TINY, "3", "<|end|><|user|>Again.<|end|><|assistant|>"),
    (CHATML, "3<|end|>", "\n<|im_start|>user\nAgain.<|end|>\n<|im_start|>assistant\n"),
    (CHATML, "3", "<|end|>\n<|im_start|>user\nAgain.<|end|>\n<|im_start|>assistant\n"),
    (SPACED, "3<|end|>", "[Again.]"),
    (SPACED, "3", " <|end|>[Again.]"),
    (OPEN_ENDED, "3", "\nuser: Again.\nassistant:"),
    (OPEN_ENDED, "3\n", "user: Again.\nassistant:"),
    # Only the end of the model's own message counts: the end token further on closes somebody else's.
    (USER_ENDED, "3<|end|>", "Again.<|end|>"),
]


def test_a_message_is_ended_once():
    for template, response, expected in ENDINGS:
        assert follows(template, response) == expected, (template, response)


def test_a_response_without_tokens_is_closed_by_the_template():
    assert follows(TINY, "") == "<|end|><|user|>Again.<|end|><|assistant|>"


def test_only_what_follows_the_last_turn_counts():
    chat = (USER, MODEL_TURN, AGAIN, MODEL_TURN, {"role": "tool", "content": "2"}, AGAIN)
    assert follows(TINY, "3<|end|>", chat) == "<|tool|>2<|end|><|user|>Again.<|end|><|assistant|>"


CALLING = {**MODEL_TURN, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "2"}
STRICT = CHATML.replace(
    "{%- for message in messages -%}",
    "{%- for message in messages -%}{%- if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls -%}"
    "{{- raise_exception('a result without a call') -}}{%- endif -%}",
)


@pytest.mark.parametrize("template", [TINY, CHATML, STRICT])
@pytest.mark.parametrize("response", ["add()<|end|>", "add()"])
def test_the_text_of_tool_calls_is_left_out(template, response):
    plain = follows(template if template != STRICT else CHATML, response, (USER, MODEL_TURN, RESULT))
    assert follows(template, response, (USER, CALLING, RESULT)) == plain
    # Calls of earlier turns make no difference.
    assert follows(template, response, (USER, CALLING, RESULT, CALLING, RESULT)) == plain


HIDES_CONTENT = TINY.replace(
    "text_of(message.content) -}}", "text_of(message.content) if not message.tool_calls -}}", 1
)
STRICT_AND_HIDING = HIDES_CONTENT.replace(
    "{%- for message in messages -%}",
    "{%- for message in messages -%}{%- if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls -%}"
    "{{- raise_exception('a result without a call') -}}{%- endif -%}",
)


def test_templates_that_hide_content_or_do_not_mark_its_end():
    tool = "<|tool|>2<|end|><|assistant|>"
    assert follows(HIDES_CONTENT, "add()<|end|>", (USER, CALLING, RESULT, CALLING, RESULT)) == tool
    assert follows(STRICT_AND_HIDING, "add()", (USER, CALLING, RESULT, CALLING, RESULT)) == f"<|end|>{tool}"
    open_ended = OPEN_ENDED.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
    assert follows(open_ended, "add()", (USER, CALLING, RESULT)) == "\ntool: 2\nassistant:"


CALLS_FIRST = (
    "{% for m in messages %}{% if m.role == 'tool' %}<result>{{ m.content }}{% else %}{{ m.role }}: "
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '[' + c.function.name + c.function.arguments + ']' }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>{% endif %}{% endfor %}"
)
SEPARATE_CALLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% for c in m.tool_calls or [] %}"
    "assistant calls {{ c.function | tojson }}<|end|>{% endfor %}{% endfor %}"
)
RESULTS_FIRST = (
    "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {% for t in messages if t.role == 'tool' and "
    "m.role == 'assistant' %}({{ t.content }}){% endfor %}{{ m.content }}<|end|>{% endfor %}"
)


def test_templates_with_rules_of_their_own():
    chat = (USER, CALLING, RESULT)
    # Arguments must be text, and calls hide the content.
    assert follows(CALLS_FIRST, "add()<|end|>", chat) == "<result>2"
    # Calls are messages of their own, which the model has written already.
    assert follows(SEPARATE_CALLS, "add()<|end|>", chat) == "tool: 2<|end|>"
    # A result before the model's text cannot be appended, but a user message can.
    assert follows(RESULTS_FIRST, "add()<|end|>", chat) == "user: 2<|end|>"


def test_results_that_the_template_refuses_become_one_user_message():
    results = (RESULT, {"role": "tool", "content": [{"type": "text", "text": "3"}]})
    made = tokenizer(STRICT)
    turn = next_turn(made, (USER, MODEL_TURN, *results), made.encode("add()<|end|>"))
    assert made.decode(turn.tokens) == "\n<|im_start|>user\n2\n3<|end|>\n<|im_start|>assistant\n"
    assert turn.chat == [USER, MODEL_TURN, {"role": "user", "content": "2\n3"}]
    # Later turns are rendered with that message.
    again = next_turn(made, (*turn.chat, MODEL_TURN, *results), made.encode("add()<|end|>"))
    assert again.tokens == turn.tokens


def test_a_message_that_the_template_leaves_out_is_noticed():
    skips_tools = CHATML.replace(
        "{%- for message in messages -%}", "{%- for message in messages if message.role != 'tool' -%}"
    )
    assert "<|im_start|>user\n2<|end|>" in follows(skips_tools, "add()", (USER, MODEL_TURN, RESULT))
    skips_users = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|end|>{% endfor %}"
    with pytest.raises(RolloutFailed, match="leaves out a message of the role 'user'"):
        follows(skips_users, "3<|end|>")


def test_a_history_that_the_template_refuses_makes_no_difference():
    refuses = "{{ raise_exception('too long') if messages | length > 3 }}" + CHATML
    chat = (USER, MODEL_TURN, AGAIN, MODEL_TURN, AGAIN)
    assert follows(refuses, "3<|end|>", chat) == follows(CHATML, "3<|end|>", chat)


def test_template_arguments_are_passed_on():
    made = tokenizer(TINY + "{{ opening }}")
    tokens = next_turn(made, (USER, MODEL_TURN, AGAIN), (END,), {"opening": "So"}).tokens
    assert made.decode(tokens).endswith("<|assistant|>So")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_drops_or_repeats_answers_is_refused(template):
    with pytest.raises(RolloutFailed, match="use a template that shows every answer exactly once"):
        follows(template, "3<|end|>")


def test_a_chat_in_which_the_model_has_not_spoken_is_refused():
    with pytest.raises(RolloutFailed, match="no answer of the model"):
        follows(TINY, "3", (USER,))
