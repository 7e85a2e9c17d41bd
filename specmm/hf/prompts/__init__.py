"""What a call asks: prompts, chats, options, and what ends an answer."""
