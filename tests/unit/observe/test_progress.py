"""What a person sees: in a narrow terminal, in a log, and below a notebook's cell."""

from __future__ import annotations

import io
import sys
from types import ModuleType

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


class Handle:
    """As the object that IPython's ``display`` returns for a ``display_id``: its output can be replaced."""

    def __init__(self, output: list[str], text: str) -> None:
        self._output = output
        self._place = len(output)
        output.append(text)

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw, "otherwise IPython shows the dictionary"
        self._output[self._place] = data["text/plain"]


def notebook(monkeypatch) -> list[str]:
    """The outputs of a cell. ``tests/integration/test_notebook.py`` has a real one."""
    output: list[str] = []

    def display(data, *, raw: bool = False, display_id: bool = False) -> Handle | None:
        if not raw:  # rich prints an object that has the text
            output.append(data._repr_mimebundle_((), ())["text/plain"])
            return None
        handle = Handle(output, data["text/plain"])
        return handle if display_id else None

    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    module.display = display
    package.display = module
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return output


def test_a_notebook_shows_one_line_per_stage_which_is_replaced(monkeypatch):
    output = notebook(monkeypatch)
    display = Display(Console(force_jupyter=True))
    display.say("Run directory runs/mine [1]")
    with display.stage("train", total=5, start=2) as reporter:
        assert output[1:] == ["train 2/5"], "a resumed run"
        reporter.update(3, {"reward": "0.25"})
        reporter.update(4, {"reward": "0.50", "tok/s": "12"})
        assert display.stage_now == StageProgress("train", 4, 5)
    with display.stage("warm start", total=2) as reporter:
        reporter.update(2, {})
    display.say("done")
    assert output[0].strip() == "Run directory runs/mine [1]"
    assert [each.strip() for each in output[1:]] == ["train 4/5  reward 0.50  tok/s 12", "warm start 2/2", "done"]
