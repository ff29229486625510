"""Errors that a user can cause, each with the field at fault and an OpenAI error code. No torch."""


class RadixServeError(Exception):
    """Base of all errors that carry a message meant for the user."""


class InvalidRequest(RadixServeError):
    """One request is wrong; the server answers 400 (or ``status``) and nobody else notices.

    ``param`` names the field, ``code`` is OpenAI's machine-readable code (``context_length_exceeded``, ...).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class ModelError(RadixServeError):
    """The model cannot be found, read or run; the message says what to do about it."""


class ConfigError(RadixServeError):
    """A flag, an environment variable or a key of the config file is wrong."""
