"""A server of OpenAI's protocol, and the engine behind it."""
