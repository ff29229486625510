"""One short file for each family of models: what its configuration says differently. No torch."""
