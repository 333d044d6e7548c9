"""Inference engines behind one interface, one file each (see ``core.protocols.InferenceEngine``)."""

from headwater.core.registry import Registry

BACKENDS = Registry("backend", "headwater.backends")
