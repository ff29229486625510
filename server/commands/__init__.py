"""The subcommands of ``radixserve``: one module each, imported when it is run."""
