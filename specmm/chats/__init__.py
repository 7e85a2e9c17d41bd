"""Chats as people keep them, read into a model's own tokens."""
