"""Headwater: reinforcement-learning post-training of language models, as one loop with two settings."""

__version__ = "0.1.0"
