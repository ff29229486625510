"""Load generators for any OpenAI-compatible server, behind ``radixserve bench``."""
