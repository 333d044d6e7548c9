"""The documented script in a real notebook kernel, as JupyterLab and VS Code start it."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from command import PROCESS_LIMIT_S, ROOT
from jupyter_client.manager import start_new_kernel


class Outputs:
    """The texts below a cell. A display that is updated is replaced, as a front end does it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._displays: dict[str, int] = {}

    def add(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            self.texts.append(content["text"])
        elif kind == "error":
            self.texts.append("\n".join(content["traceback"]))
        elif kind == "execute_result" or kind == "display_data":
            if name := content.get("transient", {}).get("display_id"):
                self._displays[name] = len(self.texts)
            self.texts.append(content["data"]["text/plain"])
        elif kind == "update_display_data":
            self.texts[self._displays[content["transient"]["display_id"]]] = content["data"]["text/plain"]


@pytest.mark.slow
def test_the_first_script_of_the_documentation_runs_in_a_kernel(tmp_path):
    page = (ROOT / "docs" / "python-api.md").read_text()
    script = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    own = {"PYTHONPATH": f"{ROOT}/src{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "IPYTHONDIR": str(tmp_path)}
    manager, client = start_new_kernel(cwd=str(tmp_path), env={**os.environ, **own}, startup_timeout=PROCESS_LIMIT_S)

    def run(cell: str) -> list[str]:
        outputs = Outputs()
        reply = client.execute_interactive(cell, output_hook=outputs.add, timeout=PROCESS_LIMIT_S)
        assert reply["content"]["status"] == "ok", "\n".join(outputs.texts)
        return [text.strip() for text in outputs.texts]

    try:
        shown = run(script)
        training = [text for text in shown if text.startswith("train ")]
        assert len(training) == 1, "one line, which is replaced"
        assert re.match(r"train 3/3  reward \d", training[0])
        assert any(text.startswith("Run directory ") for text in shown)
        assert shown[-1].startswith(f"Result('{tmp_path}/runs/run', 3 steps)")
        # The kernel lives on, with the reward function of the first cell and the result.
        assert run("result.is_finished, [each['step'] for each in result.metrics]") == ["(True, [1, 2, 3])"]
        more = run(
            "again = train(data=rows, reward=correct, resume=result.path, trainer={'total_steps': 4})\nagain.step"
        )
        assert [text[:9] for text in more if text.startswith("train ")] == ["train 4/4"]
        assert more[-1] == "4"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
