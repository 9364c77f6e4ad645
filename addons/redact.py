"""Keep secrets out of whatever is written down: states, configs, warnings, errors and local files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

__all__ = ["HIDDEN", "redact", "secrets_in"]

HIDDEN = "***"
"""What stands in the place of a secret."""

_WORD = (
    r"(?:api[_-]?(?:key|token|tkn)|(?:access|private)[_-]?key|credentials?|passw(?:or)?d|passphrase|secret|tkn|token)"
)
_KEY = re.compile(rf"(?i)(?:^|[^a-z]){_WORD}(?:$|[^a-z])")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_OF_URL = re.compile(r"(?<=://)[^\s/?#]+@")  # Up to the last @: a password may hold one.
_NAMED = re.compile(rf"(?i)\b({_WORD}[\"']?\s*[:=]\s*[\"']?)[^\s\"',;)}}]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")
_TOKEN = re.compile(r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|xox[abp]-|wandb_v1_)[\w-]{8,}")
_SHORT = 6  # A shorter value is no secret worth the name, and would blank out parts of ordinary words.


def redact(value: Any, secrets: Iterable[str] = ()) -> Any:
    """Return a copy in which every secret reads ``***``.

    Hidden are text under a key such as ``api_key``, ``api_token``, ``token``, ``password`` or ``secret``, the user and
    password of a URL, tokens that can be told by their beginning (``hf_...``), and the values of environment variables
    with such a name (``WANDB_API_KEY``, ``NEPTUNE_API_TOKEN``, ``HF_TOKEN``). Numbers stay as they are.

    Parameters
    ----------
    value : object
        Text, or mappings, lists and tuples of it, nested in any way.
    secrets : iterable of str
        Further texts to hide wherever they occur.

    Returns
    -------
    object
        Of the same shape; other objects are returned as they are.

    Examples
    --------
    >>> redact({"project": "mine", "api_key": "0123456789", "url": "https://me:pass@host/x"})
    {'project': 'mine', 'api_key': '***', 'url': 'https://***@host/x'}
    >>> redact("login with abcdefgh failed: api_token=12345678", secrets=["abcdefgh"])
    'login with *** failed: api_token=***'
    """
    known = {text for text in (*secrets, *_of_environment()) if len(text) >= _SHORT}
    return _redact(value, sorted(known, key=len, reverse=True))


def secrets_in(value: Any) -> list[str]:
    """List the texts that stand under a key that looks like a secret.

    Parameters
    ----------
    value : object
        Mappings, lists and tuples, nested in any way.

    Returns
    -------
    list of str
        For the ``secrets`` of `redact`: a client's error may repeat what it was given.

    Examples
    --------
    >>> secrets_in({"project": "mine", "settings": {"api_key": "0123456789"}})
    ['0123456789']
    """
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
    """Hide what looks like a secret; most texts are names of options, and hold none of the signs that one needs."""
    if ":" in text or "=" in text:
        text = _NAMED.sub(rf"\g<1>{HIDDEN}", _OF_URL.sub(f"{HIDDEN}@", text))
    if "bearer" in text.lower():
        text = _BEARER.sub(rf"\g<1>{HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, text) if "_" in text or "-" in text else text


def _is_secret(key: Any) -> bool:
    return isinstance(key, str) and _is_name_of_secret(key)


@lru_cache(maxsize=1024)  # The names of the environment and of the options are asked for again and again.
def _is_name_of_secret(name: str) -> bool:
    return _KEY.search(_CAMEL.sub("_", name)) is not None


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value, whatever it stands under."""
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
