"""Runs code of a model, isolated from this machine: ``Sandbox``. See docs/sandbox.md."""

from headwater.sandbox.records import Limits, Outcome, SandboxUnavailable
from headwater.sandbox.sandbox import CodeSession, Program, Sandbox

__all__ = ["CodeSession", "Limits", "Outcome", "Program", "Sandbox", "SandboxUnavailable"]
