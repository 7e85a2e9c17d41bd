"""Inputs of a call: prompts, chats, options, and the conditions that end an answer."""
