"""What the configuration of each family of models says differently, in short files. No torch."""
