"""Agents that reach the model through an OpenAI endpoint: their processes, the server, and what they said by token."""
