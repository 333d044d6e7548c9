"""What a person sees: in a narrow terminal, and in a log."""

from __future__ import annotations

import io

from rich.console import Console

from headwater.observe.progress import Display
from headwater.observe.status_file import StageProgress

NUMBERS = {"reward": "0.420", "length": "12.0", "tok/s": "1034", "gen/rew/train": "0.28/0.06/0.09 s"}


def test_bar_and_numbers_fit_eighty_columns():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, color_system=None)
    with Display(console).stage("train", 80) as reporter:
        reporter.update(40, NUMBERS)
    shown = output.getvalue()
    assert "40/80" in shown
    assert "reward 0.420  length 12.0  tok/s 1034  gen/rew/train 0.28/0.06/0.09 s" in shown


def test_others_can_read_how_far_a_stage_is():
    display = Display(Console(file=io.StringIO()))
    with display.stage("warm start", 50, start=2) as reporter:
        assert display.stage_now == StageProgress("warm start", 2, 50)
        reporter.update(7, NUMBERS)
        assert display.stage_now == StageProgress("warm start", 7, 50)
    assert display.stage_now is None


def test_a_log_gets_the_first_and_the_last_line_whole():
    output = io.StringIO()
    with Display(Console(file=output, width=40)).stage("train", 50) as reporter:
        for step in range(1, 51):
            reporter.update(step, NUMBERS)
    lines = output.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/50", "50/50"]
    assert lines[0].endswith("0.28/0.06/0.09 s")


def test_what_is_said_is_printed_as_it_is():
    output = io.StringIO()
    display = Display(Console(file=output, width=40))
    text = "Stopping: pip install 'headwater[json]' [/tmp/x] [red]not red[/]"
    display.say(text)
    with display.stage("train", 1) as reporter:
        reporter.update(1, {"dropped": "1 [/odd]"})
    assert output.getvalue().splitlines() == [text, "train 1/1  dropped 1 [/odd]"]
