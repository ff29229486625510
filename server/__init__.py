"""The OpenAI-compatible frontend: HTTP, text, and the processes. Loads no torch."""
