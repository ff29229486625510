"""API keys: who may talk to which routes."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from pydantic import SecretStr

# Probes have no key. (A browser's preflight has none either: OPTIONS is open everywhere.)
OPEN_PATHS = frozenset({"/health", "/metrics"})


class ApiKeys:
    """Compares bearer tokens with the configured keys; without keys everyone is admitted."""

    def __init__(self, keys: Sequence[SecretStr]):
        self._keys = [key.get_secret_value().encode() for key in keys]

    def admits(self, method: str, path: str, authorization: bytes | None) -> bool:
        if not self._keys or method == "OPTIONS" or path in OPEN_PATHS:
            return True
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        token = token.strip()
        # Every key is compared, in constant time each: the duration tells nothing about the keys.
        return sum(hmac.compare_digest(token, key) for key in self._keys) > 0
