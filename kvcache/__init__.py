"""The prefix cache, page ownership and the KV buffer."""
