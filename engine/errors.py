"""Errors that a user can cause, each with the field at fault and an OpenAI error code. No torch."""


class RadixServeError(Exception):
    """Base of all errors that carry a message meant for the user."""


class RequestError(RadixServeError):
    """One request gets no answer, and nobody else notices.

    ``param`` names the field at fault, ``code`` is OpenAI's machine-readable code (``context_length_exceeded``, ...),
    ``status`` that of HTTP, by default the class's. A client may try again after ``retry_after_s``.
    """

    status = 500

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = self.status if status is None else status
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """The request is wrong."""

    status = 400


class ModelError(RadixServeError):
    """The model cannot be found, read or run; the message says what to do about it."""


class ConfigError(RadixServeError):
    """A flag, an environment variable or a key of the config file is wrong."""


class EngineLost(RadixServeError):
    """A part of the engine has died, and the rest cannot compute without it: it has to be started anew."""
