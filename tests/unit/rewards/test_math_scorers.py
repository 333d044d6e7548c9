"""Mathematical answers that are right, wrong, written in strange ways, or impossible to compare."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
from ending import end_verifier
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import RewardFailed
from headwater.rewards import verifier as verifier_module
from headwater.rewards.scorers.geometry3k import geometry3k
from headwater.rewards.scorers.math import math
from headwater.rewards.scorers.math_dapo import math_dapo
from headwater.rewards.verifier import Verdict, VerifierProcess, verify


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left():
    yield
    end_verifier()


EQUAL = r"""
\frac{1}{2} ; 0.5
\frac12 ; 1/2
\dfrac{3}{4} ; \frac{6}{8}
1\frac{1}{2} ; \frac{3}{2}
\frac{3}{2} ; 1\frac{1}{2}
\frac{3}{2} ; 1 1/2
-1\frac12 ; -\frac{3}{2}
2\frac{3}{4} ; 2.75
.5 ; 0.5
-0 ; 0
7 ; 7.
\frac{1}{3} ; 0.3333333333
(1,2] ; (1, 2]
(1,2] ; \left( 1, 2 \right]
(1,2] ; 1<x\le 2
x > 3 ; (3,\infty)
(3,\infty) ; \{x \mid x > 3\}
\{x \in \mathbb{R} : -1 \le x < 2\} ; [-1,2)
\left\{ x | x \geq 5 \right\} ; [5, \infty)
(-\infty,3)\cup(5,\infty) ; (-\infty, 3) \cup (5, +\infty)
(-\infty,3)\cup(5,\infty) ; (5,\infty)\cup(-\infty,3)
\{1,2,3\} ; \{3,2,1\}
\{1,2,3\} ; 1,2,3
1,2,3 ; 3,2,1
x \in \{1,2\} ; \{1,2\}
\emptyset ; \{\}
10\text{ cm} ; 10
10 ; 10\text{ cm}
10 ; 10 cm
10 ; 10\,\mathrm{cm}^2
10 ; 10 \text{ square units}
50\% ; 50
50 ; 50\%
0.5 ; 50\%
50\% ; 0.5
\text{Monday} ; Monday
\text{(C)} ; C
\text{(C)} ; (C)
C ; \text{C}
\text{no solution} ; \text{No solution}
(1,2) ; (1, 2)
(3, \frac{\pi}{2}) ; \left(3,\frac{\pi}{2}\right)
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ; \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} ; \begin{pmatrix} 0.2 \\ -3.6 \end{pmatrix}
2\sqrt{3} ; \sqrt{12}
\sqrt{2} ; 1.41421356
\sqrt2 ; \sqrt{2}
\frac{1}{\sqrt{2}} ; \frac{\sqrt{2}}{2}
\sqrt[3]{8} ; 2
90^\circ ; 90
90 ; 90^{\circ}
90 ; 90°
90 ; 90 \text{ degrees}
12,345 ; 12345
12345 ; 12{,}345
12345 ; 12,\!345
12345 ; 12\,345
1234567 ; 1,234,567
\$32.50 ; 32.5
x=5 ; 5
5 ; x=5
y=2x+3 ; y = 3+2x
y=2x+3 ; 2x+3
x^2+y^2=1 ; y^2+x^2-1=0
x=1, x=2 ; 1,2
3\pm\sqrt{2} ; 3+\sqrt2, 3-\sqrt2
\pm 2 ; 2,-2
x^2+2x+1 ; (x+1)^2
(x+1)(x-1) ; x^2-1
\frac{a}{b} ; a/b
\frac{1}{2}x ; 0.5x
3+4i ; 4i+3
10^{-3} ; 0.001
2^{10} ; 1024
1.2\times 10^{5} ; 120000
\log_2 8 ; 3
4\pi ; 12.566370614
\infty ; +\infty
11010_2 ; 11010
\binom{5}{2} ; 10
5! ; 120
6:30 ; 6:30
6:30\text{ p.m.} ; 6:30
\frac{3}{5}\text{ of the pizza} ; 3/5
\cos(1) ; \sqrt{1-\sin^2(1)}
"""
DIFFERENT = r"""
\frac{1}{2} ; \frac{1}{3}
1\frac{1}{2} ; \frac{1}{2}
1 ; 1 1/2
0.333 ; 1/3
\pi ; 3.14159
(1,2] ; [1,2]
[0,1) ; [0,1]
x > 3 ; [3,\infty)
\{1,2\} ; \{1,3\}
\{1,2\} ; \{1,2,3\}
5 ; 5, 6
5 ; 5 or 6
5 ; 5 \text{ or } 6
10 ; 11\text{ cm}
50\% ; 5
\text{Monday} ; \text{Tuesday}
\text{(C)} ; \text{(B)}
\text{even} ; \text{odd}
3 ; \text{three}
(1,2) ; (2,1)
\{1,2\} ; (1,2)
(1,2) ; \{1,2\}
[1,2] ; \left\{1, 2\right\}
[3,\infty) ; \{x \mid x > 3\}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ; \begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix}
2\sqrt{3} ; 3\sqrt{2}
90^\circ ; 91^\circ
12345 ; 12,346
123456789012345678901 ; 123456789012345678902
5 ; x = 6
x=5 ; y=5
y=2x+3 ; y=2x-3
(x+1)(x-1) ; x^2+1
3+4i ; 3-4i
6:30 ; 6:31
x ; y
5 ; \text{not } 5
5 ; 5\neq
"""
HANGS = [
    r"9^{9^{9^{9}}}",
    r"100000000!",
    r"\binom{1000000000}{500000000}",
    r"(x+1)^{1000000}",
    r"\int_0^{1} e^{x^{x^{x}}} dx",
    r"\sin(10^{10^{8}})",
    r"x^{1000}+y^{1000}-(x+y)^{1000}",
]
SLOW = ["(" * 400, r"\frac{1}{" * 60 + "x" + "}" * 60, "1" * 900 + ".5"]


def pairs(table: str) -> list[list[str]]:
    return [[part.strip() for part in line.split(" ; ")] for line in table.strip().splitlines()]


def test_answers_in_many_notations():
    for truth, answer in pairs(EQUAL):
        assert verify(truth, answer, cpu_s=20) == "right", (truth, answer)
    for truth, answer in pairs(DIFFERENT):
        assert verify(truth, answer, cpu_s=20) == "wrong", (truth, answer)


def test_answers_that_cannot_be_compared_are_named_and_take_bounded_time():
    for answer in HANGS:
        began = time.monotonic()
        result = math("math", f"It is \\boxed{{{answer}}}", "5", {}, verify_cpu_s=0.3)
        assert result == {
            "score": 0.0, "acc": 0.0, "pred": answer, "verdict": "timed_out", "unverified": 1.0
        }, answer  # fmt: skip
        assert time.monotonic() - began < 300
    for answer in SLOW:
        assert math("math", f"\\boxed{{{answer}}}", "5", {}, verify_cpu_s=0.5)["score"] == 0.0
    assert math("math", f"\\boxed{{{'x+' * 1000}x}}", "5", {})["verdict"] == "too_long"
    # The process that was killed is replaced.
    assert math("math", r"\boxed{\frac{10}{2}}", "5", {})["score"] == 1.0


@settings(max_examples=15, deadline=None)
@given(st.text(st.sampled_from("\\{}()[]^_$,.=<>+-*/!%0129xyi ") | st.characters(), max_size=30))
def test_any_text_gets_a_verdict(answer):
    for fragment in (answer, f"\\frac{{{answer}}}{{2}}"):
        assert verify("x+1", fragment, cpu_s=0.3) in get_args(Verdict)
        assert math("math", f"\\boxed{{{fragment}}}", "x+1", {}, verify_cpu_s=0.3)["score"] in (0.0, 1.0)


def test_where_the_answer_is_looked_for():
    for text, truth, score in [
        (r"\boxed{\frac{4}{8}}", r"\frac{1}{2}", 1.0),
        (r"The solution follows. \boxed{1} \boxed{2}", "1, 2", 1.0),
        (r"I first thought \boxed{3}, but it is \boxed{4}. I hope this helps!", "4", 1.0),
        (r"\boxed{4} and not, as I thought, \boxed{3}", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        ("4", "4", 0.0),
        ("There is no answer.", "4", 0.0),
        (r"\boxed{4", "4", 0.0),
        (r"\boxed{2}", r"We see that $x=2$, so the answer is $\boxed{2}$.", 1.0),
        (r"\boxed{2}", ["1", "2"], 1.0),
    ]:
        assert math("math", text, truth, {})["score"] == score, text
    for text, score in [("<answer>4</answer>", 1.0), ("the answer is 4.", 1.0), ("Answer: $4$", 1.0), ("4", 0.0)]:
        assert math("math", text, "4", {}, extract="any")["score"] == score, text
    with pytest.raises(ValueError, match="no ground truth"):
        math("math", r"\boxed{4}", None, {})
    with pytest.raises(ValueError, match="extract = 'all'"):
        math("math", r"\boxed{4}", "4", {}, extract="all")  # type: ignore[arg-type]


def test_dapo_and_aime():
    for text, score in [
        ("thoughts\nAnswer: 204", 1.0),
        ("Answer: $204$", 1.0),
        ("Answer: 204.0", 1.0),
        (r"Answer: \boxed{204}", 1.0),
        (r"so \boxed{204}", 1.0),
        ("Answer: 205", -1.0),
        ("204", -1.0),
    ]:
        assert math_dapo("aime_2024", text, "204", {})["score"] == score, text
    assert math_dapo("aime_2024", "Answer: 204", "204", {}, strict_box_verify=True)["score"] == -1.0
    assert math_dapo("aime_2024", "Answer: 205", "204", {}, wrong_score=0.0)["score"] == 0.0


def test_geometry3k():
    thought = "<think>The angles add up to 180.</think>"
    for text, score in [
        (thought + r"So $\boxed{60}$.", 1.0),
        (thought + r"So $\boxed{61}$.", 0.1),
        (r"So $\boxed{60}$.", 0.9),
        (thought + "So 60.", 0.0),
        (r"<think>\boxed{60}", 0.9),
    ]:
        assert geometry3k("hiyouga/geometry3k", text, "60", {})["score"] == pytest.approx(score), text


def test_the_verifier_survives_the_death_of_its_processes(monkeypatch):
    verifier, is_sent, send = VerifierProcess(), threading.Event(), verifier_module._send
    monkeypatch.setattr(verifier_module, "_send", lambda *given: (send(*given), is_sent.set()))
    try:
        assert verifier.verify("x+1", "1+x", 20.0) == "right"
        process = verifier._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert verifier.verify("x+1", "1+x", 20.0) == "right"
        process = verifier._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)  # so that it dies in the middle of a request
        is_sent.clear()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(verifier.verify, "x+1", "1+x", 20.0)
            assert is_sent.wait(60)
            assert not waiting.done()
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(RewardFailed, match="ended with code -9"):
                waiting.result(timeout=60)
        assert verifier.verify("x+1", "2+x", 20.0) == "wrong"
    finally:
        verifier.close()


def test_without_math_verify_the_message_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    verifier = VerifierProcess()
    with pytest.raises(RewardFailed, match="pip install math-verify"):
        verifier.verify("x+1", "1+x", 3.0)
    verifier.close()
