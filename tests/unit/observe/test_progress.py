"""What a run shows below a notebook's cell."""

from __future__ import annotations

import sys
from types import ModuleType

from rich.console import Console

from headwater.observe.progress import Display
from headwater.observe.status_file import StageProgress


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
    """The outputs of a cell. IPython is no dependency, so its function is replaced."""
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
