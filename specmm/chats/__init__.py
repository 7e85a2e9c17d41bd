"""Reads chats in common file formats into a model's tokens."""
