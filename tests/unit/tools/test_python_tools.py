"""Python in the sandbox: without state, and with a session for each episode."""

from __future__ import annotations

import asyncio

import pytest
import tiny
from tools.boxes import ask, call, row

from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.errors import ConfigError
from headwater.sandbox import Sandbox, SandboxUnavailable
from headwater.tools.toolbox import Toolbox

LIMITS = SandboxConfig(timeout_s=60, cpu_s=1, memory_mib=256, max_concurrent=2)


@pytest.fixture(scope="module", autouse=True)
def _isolation():
    try:
        Sandbox(LIMITS).start()
    except SandboxUnavailable as error:
        pytest.skip(f"no isolation works here: {error}")


def box(name: str) -> Toolbox:
    made = Toolbox.from_config(ToolsConfig(use=(name,), max_result_tokens=4000), LIMITS, tiny.tokenizer())
    assert made is not None
    return made


def test_programs_start_from_the_beginning():
    codes = [
        "x = 6\nprint(x * 7)",
        "print(x)",
        "x = 1",
        "while True: pass",
        "import os; print(os.getcwd()); os._exit(3)",
    ]
    results = ask(box("python"), *(call("python", code=code) for code in codes))
    assert all(each.failure is None for each in results)
    assert results[0].text == "42"
    assert "NameError: name 'x' is not defined" in results[1].text
    assert results[2].text == "(no output; print the values that you need)"
    assert "Error: " in results[3].text
    assert "Error: " in results[4].text
    assert [each.metrics["errors"] for each in results] == [0.0, 1.0, 0.0, 1.0, 1.0]


def test_a_session_keeps_its_variables_and_ends_with_its_episode():
    toolbox = box("python_session")

    async def episode(number: int) -> list[str]:
        async with toolbox.open(row(str(number))) as session:
            codes = [f"x = {number}", "x += 1\nprint(x)", "1 / 0", "print(x)"]
            texts = [(await session.call(call("python", code=code))).text for code in codes]
            # Parallel calls of one episode run one after the other.
            more = await asyncio.gather(*(session.call(call("python", code="x += 1; print(x)")) for _ in range(3)))
            return [*texts, *sorted(each.text for each in more)]

    async def run():
        results = await asyncio.gather(*(episode(number) for number in (10, 20, 30)))
        tool = toolbox._tools["python"].tool
        assert tool._sessions == tool._turns == {}
        await toolbox.close()
        return results

    for number, texts in zip((10, 20, 30), asyncio.run(run()), strict=True):
        assert texts[1] == str(number + 1)
        assert "ZeroDivisionError" in texts[2]
        assert texts[3:] == [str(number + more) for more in (1, 2, 3, 4)]


def test_a_tool_has_as_many_slots_as_its_sandbox(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 999)  # of the machine, not of this process
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    for name in ("python", "python_session"):
        made = Toolbox.from_config(ToolsConfig(use=(name,)), SandboxConfig(), tiny.tokenizer())
        assert made._tools["python"].tool.max_concurrent == 3


def test_a_call_that_exceeds_the_limit_of_tools_ends_its_program():
    made = Toolbox(ToolsConfig(use=("python",), timeout_s=0.5), LIMITS, tiny.tokenizer())
    assert ask(made, call("python", code="import time; time.sleep(60)"))[0].failure == "timed_out"


def test_without_isolation_a_run_does_not_start(monkeypatch):
    def refuse(self):
        raise SandboxUnavailable("no isolation works on this machine")

    monkeypatch.setattr(Sandbox, "start", refuse)
    with pytest.raises(ConfigError, match="tool python: no isolation works on this machine"):
        box("python")
