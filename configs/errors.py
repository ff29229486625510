"""What is wrong with options. Apart, so that the command line can catch it without loading the schema."""


class OptionError(ValueError):
    """A flag, an environment variable or a key of a config file is wrong; the message is meant for the user."""
