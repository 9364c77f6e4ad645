"""Remove secrets from all that is written: states, configs, warnings, errors and local files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

__all__ = ["HIDDEN", "redact", "secrets_in"]

HIDDEN = "***"
"""The replacement of a secret."""

_WORD = (
    r"(?:api[_-]?(?:keys?|token|tkn)|(?:access|account|app|auth|client|db|encryption|licen[cs]e|private|secret|service"
    r"|session|signing|ssh|storage)[_-]?key|credentials?|passw(?:or)?ds?|passphrase|passcode|secrets?|session[_-]?id"
    r"|sentry[_-]?dsn|connection[_-]?string|(?:db|ftp|mail|root|smtp|user)[_-]?pass|tkn|token)"
)
# These mean a secret only as the last word: auth_mode and pw_conv are ordinary, and so is PWD, the working folder.
_LAST = r"(?:o?auth|cookies?|jwt|pw|(?<=[_-])pwd|webhook(?:[_-]?ur[li])?)"
_KEY = re.compile(rf"(?i)(?:^|[^a-z])(?:{_WORD}(?:$|[^a-z])|(?:{_LAST}|authorization)$)")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_OF_URL = re.compile(r"(?<=://)[^\s/?#]+@")  # Up to the last @: a password may hold one.
_NAMED = re.compile(rf"(?i)(?<![a-z])((?:{_WORD}|{_LAST})[\"']?\s*[:=]\s*[\"']?)(?!\*\*\*)[^\s\"',;)}}]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+|authorization[\"']?\s*[:=]\s*[\"']?\w+\s+)[\w.~+/=-]{8,}")
# Tokens that begin with the name of a service: OpenAI, Hugging Face, GitHub, GitLab, Slack, AWS, Google, npm, PyPI ...
_PREFIX = (
    r"(?:sk-|hf_|api_org_|gh[opsur]_|github_pat_|glpat-|xox[abeoprs]-|xapp-|AKIA|ASIA|AIza|GOCSPX-|ya29\.|npm_|pypi-|dapi"
    r"|do[oprt]_v1_|nvapi-|gsk_|r8_|hv[bs]\.|SG\.|sntry[su]_|shp(?:at|ca|pa|ss)_|[sr]k_(?:live|test)_|wandb_v1_|eyJ)"
)
_VENDOR = re.compile(rf"(?<![A-Za-z0-9_]){_PREFIX}[\w.-]*?[A-Za-z0-9]{{12,}}[\w.~+/=-]*")
_LEAST = 15  # The shortest text with such a token.
_SHORT = 6  # A shorter value is not a real secret, and would hide parts of ordinary words.


def redact(value: Any, secrets: Iterable[str] = ()) -> Any:
    """Return a copy in which every secret reads ``***``.

    Hidden are str values under a key such as ``api_key``, ``token``, ``password``, ``secret``, ``auth`` or ``cookie``,
    the user and password of a URL, what follows ``Authorization:``, tokens with the prefix of a service (``hf_...``,
    ``AKIA...``, ``eyJ...``), and the values of environment variables with such a name (``WANDB_API_KEY``,
    ``NEPTUNE_API_TOKEN``, ``HF_TOKEN``). Numbers stay as they are.
    """
    secret_texts = {text for text in (*secrets, *_of_environment()) if len(text) >= _SHORT}
    return _redact(value, sorted(secret_texts, key=len, reverse=True))


def secrets_in(value: Any) -> list[str]:
    """List the str values under keys that look like names of secrets."""
    if isinstance(value, Mapping):
        return [text for key, item in value.items() for text in (_texts(item) if _is_secret(key) else secrets_in(item))]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in secrets_in(item)]
    return []


def _redact(value: Any, known: list[str]) -> Any:
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, HIDDEN)
        return _without_patterns(value)
    if isinstance(value, Mapping):
        return {
            _redact(key, known): HIDDEN if _is_secret(key) and any(_texts(item)) else _redact(item, known)
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_redact(item, known) for item in value)
    return value


def _without_patterns(text: str) -> str:
    """Hide what looks like a secret, with a fast path for texts without ":" and "=", as option names are."""
    if ":" in text or "=" in text:
        text = _OF_URL.sub(f"{HIDDEN}@", text)
        text = _BEARER.sub(rf"\g<1>{HIDDEN}", text)
        text = _NAMED.sub(rf"\g<1>{HIDDEN}", text)
    elif "bearer" in text.lower():
        text = _BEARER.sub(rf"\g<1>{HIDDEN}", text)
    return _VENDOR.sub(HIDDEN, text) if len(text) >= _LEAST else text


def _is_secret(key: Any) -> bool:
    return isinstance(key, str) and _is_name_of_secret(key)


@lru_cache(maxsize=1024)  # The same names of options and of the environment recur.
def _is_name_of_secret(name: str) -> bool:
    return _KEY.search(_CAMEL.sub("_", name)) is not None


def _texts(value: Any) -> Iterator[str]:
    """Yield every str in a value, under any key."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _of_environment() -> list[str]:
    return [value for name, value in os.environ.items() if _is_secret(name)]
