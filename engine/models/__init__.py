"""From a ``ModelSpec`` to the code that computes it."""
