"""Chats: messages, the renderer that turns them into tokens, and the tokens between two turns of the model."""
