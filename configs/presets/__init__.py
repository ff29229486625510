"""Named sets of options as TOML, chosen by ``--preset``."""
