"""API keys: who may talk to which routes, and whose requests they are."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from radixserve.configs.schema import ServerOptions
from radixserve.engine.errors import ConfigError, InvalidRequest

EVENTS_PATH = "/engine/events"
# Probes have no key. (A browser's preflight has none either: OPTIONS is open everywhere.) The page asks its reader for
# one; its files are the same everywhere.
OPEN_PATHS = frozenset({"/health", "/metrics", "/"})
PAGE_PREFIX = "/page/"
# What concerns other people's requests: for the operator alone, where one has a key.
OPERATOR_PATHS = frozenset({"/abort_request", "/flush_cache", "/server_info", EVENTS_PATH})


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whom keys belong to. When the engine is busy, tenants share it by their weights."""

    name: str = ""
    weight: float = 1.0


ANYBODY = Tenant()


class ApiKeys:
    """Finds the tenant of a bearer token; without keys everyone is admitted. Holds the keys' digests only, so that
    they have one length, and stand in no traceback."""

    def __init__(self, tenants: Mapping[str, Tenant], operator_keys: Iterable[str] = ()):
        """``tenants``: by key. ``operator_keys`` are good for all routes, and alone for ``OPERATOR_PATHS``."""
        self._tenants = [(_digest(key.encode()), tenant) for key, tenant in tenants.items()]
        self._operators = [_digest(key.encode()) for key in operator_keys]

    @property
    def num_tenants(self) -> int:
        """0: there are no keys."""
        return len({tenant for _, tenant in self._tenants})

    @property
    def has_operators(self) -> bool:
        return bool(self._operators)

    def tenant(self, method: str, path: str, authorization: bytes | None) -> Tenant:
        """Whose request this is. Raises ``InvalidRequest`` with status 401 or 403 if it must not be served."""
        if method == "OPTIONS" or path in OPEN_PATHS or path.startswith(PAGE_PREFIX):
            return ANYBODY
        scheme, _, token = (authorization or b"").partition(b" ")
        given = _digest(token.strip()) if scheme.lower() == b"bearer" else b""
        # Every key is compared, in constant time each: the duration tells nothing about the keys.
        is_operator = sum(hmac.compare_digest(digest, given) for digest in self._operators) > 0
        found = [tenant for digest, tenant in self._tenants if hmac.compare_digest(digest, given)]
        if not (is_operator or found) and self._tenants:
            raise InvalidRequest("a valid API key is needed", code="invalid_api_key", status=401)
        if self._operators and path in OPERATOR_PATHS and not is_operator:
            raise InvalidRequest(f"{path} needs an admin key", code="admin_key_needed", status=403)
        return found[0] if found else ANYBODY


def read_api_keys(options: ServerOptions) -> ApiKeys:
    """The keys of ``--api-key``, of the lines in ``--api-key-file``, and of ``--admin-api-key``. Raises ``ConfigError``
    that names the line."""
    tenants = {key.get_secret_value(): Tenant(f"key {n}") for n, key in enumerate(options.api_key, 1)}
    weights: dict[str, float] = {}
    for where, key, tenant in _read_file(options.api_key_file) if options.api_key_file else ():
        if key in tenants:
            raise ConfigError(f"{where}: this key is given twice")
        if weights.setdefault(tenant.name, tenant.weight) != tenant.weight:
            raise ConfigError(f"{where}: {tenant.name} has another weight above")
        tenants[key] = tenant
    return ApiKeys(tenants, [key.get_secret_value() for key in options.admin_api_key])


def _read_file(path: str) -> Iterator[tuple[str, str, Tenant]]:
    """Where each key stands, the key, and whose it is."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the key file {path}: {error}") from None
    # A comment begins with a word: the # inside a key is part of the key.
    if not any(words := [list(takewhile(lambda word: word[0] != "#", line.split())) for line in lines]):
        raise ConfigError(f"there is no key in {path}; each line has KEY, KEY NAME or KEY NAME WEIGHT")
    for number, parts in enumerate(words, 1):
        where = f"{path}, line {number}"
        match parts:
            case []:
                pass
            case [key]:
                yield where, key, Tenant(where)
            case [key, name]:
                yield where, key, Tenant(name)
            case [key, name, weight]:
                yield where, key, Tenant(name, _weight(weight, where))
            case _:
                raise ConfigError(f"{where}: more than KEY NAME WEIGHT")


def _weight(text: str, where: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0.001 <= weight <= 1000:
        raise ConfigError(f"{where}: the weight must be a number from 0.001 to 1000")
    return weight


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
