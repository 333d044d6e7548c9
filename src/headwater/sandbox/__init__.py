"""Runs code of a model, isolated from this machine: ``Sandbox``. See docs/sandbox.md."""

from headwater.sandbox.outcome import Limits, Outcome, SandboxUnavailable
from headwater.sandbox.sandbox import Program, Sandbox
from headwater.sandbox.session import CodeSession

__all__ = ["CodeSession", "Limits", "Outcome", "Program", "Sandbox", "SandboxUnavailable"]
