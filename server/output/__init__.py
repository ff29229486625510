"""From generated text to what it means: reasoning, content and tool calls."""
