"""Finding the final answer in a response, also in a hostile one."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from headwater.rewards.answers import (
    last_answer_line,
    last_answer_tag,
    last_boxed,
    last_of_either,
    same_text,
    tidy,
    whole_number,
)
from headwater.rewards.scorers.countdown import countdown

LATEX = st.text(st.sampled_from(r"\{}$ abcdeox,.=<>/0123456789^_*-") | st.characters(), max_size=60)


def test_the_last_box():
    for text, content in [
        (r"so it is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"first \boxed{1}, but after more thought \boxed{2}", "2"),
        (r"$\boxed{1}$, $\boxed{3}$", "1, 3"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"The answer is \boxed{4}. \boxed{4}", "4"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\fbox{3}", "3"),
        (r"\boxed 5 $", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (
            r"\boxed{\left\{ x \mid x > \frac{1}{2} \right\}} where x is real",
            r"\left\{ x \mid x > \frac{1}{2} \right\}",
        ),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        (r"\boxed{1} and then it was cut \boxed{2", None),
        ("no box", None),
        ("", None),
    ]:
        assert last_boxed(text) == content, text


def test_the_last_answer_line():
    for text, content in [
        ("Answer: 5", "5"),
        ("**Answer:** 34", "34"),
        ("answer : **$\\frac12$**.", "\\frac12"),
        ("Answer: 1\nmore\nAnswer: 2\nand the rest", "2"),
        ("\\boxed{3} so Answer: 4", "4"),
        ("Answer: \\boxed{7}", "7"),
        ("Answer: 3, no: \\boxed{5}", "5"),
        ("5", None),
        ("Answer:\n", None),
    ]:
        assert last_of_either(text) == content, text
    assert last_answer_line("so the answer is $12$.", needs_colon=False) == "12"
    assert last_answer_line("so the answer is $12$.") is None


def test_the_last_answer_tag():
    assert last_answer_tag("<answer>a</answer> or <answer> b </answer> c") == "b"
    assert last_answer_tag("<answer>a") is None
    assert last_answer_tag("a</answer>") is None


@given(LATEX)
def test_a_box_is_found_whatever_surrounds_it(text):
    assert last_boxed(text + " x \\boxed{41} ") == "41"
    for find in (last_boxed, last_answer_line, last_answer_tag, last_of_either):
        assert find(text) is None or isinstance(find(text), str)


@given(LATEX)
def test_an_answer_is_the_same_text_as_itself(text):
    assert same_text(text, f"  ${text}$ ") or not tidy(text).strip(" $*.~\\,;:!\n\t")
    assert tidy(tidy(text)) == tidy(tidy(tidy(text)))


@given(st.integers())
def test_whole_numbers_are_read_with_and_without_separators(number):
    assert whole_number(str(number)) == whole_number(f" ${number:,}$. ") == number
    assert whole_number(f"{number}.5") is None


def test_hostile_texts_take_little_time():
    began = time.process_time()
    for text in ["answer" + " " * 200_000, "\\boxed{1}" + " " * 100_000 + "x\\boxed{2}", "\\boxed{" * 30_000,
                 "<answer>" * 50_000, "$" * 50_000, "{" * 100_000, "answer:" * 30_000, "\\boxed{1}" * 20_000,
                 "1 " * 50_000, "1," * 50_000]:  # fmt: skip
        for find in (last_boxed, last_answer_line, last_answer_tag, last_of_either, tidy):
            find(text)
        same_text(text, "5")
        whole_number(text)
        countdown("countdown", text, {"target": 5, "numbers": [2, 3]}, {})
    assert time.process_time() - began < 20  # it takes half a second; a quadratic search takes minutes
