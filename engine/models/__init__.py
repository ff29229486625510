"""One short file per architecture."""
