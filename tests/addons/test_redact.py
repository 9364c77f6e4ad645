"""F-C7: no secret is written down."""

from __future__ import annotations

import pytest

from zae.addons.redact import redact, secrets_in


@pytest.mark.parametrize(
    "key",
    ["api_key", "api_token", "api_tkn", "apiKey", "API-KEY", "token", "hf_token", "password", "passwd", "secret",
     "client_secret", "aws_secret_access_key", "accessToken", "WANDB_API_KEY", "credentials", "db.password"],
)  # fmt: skip
def test_fc7_text_under_a_secret_key_is_hidden(key):
    assert redact({"a": [{key: "canary-1234"}]}) == {"a": [{key: "***"}]}
    assert redact({key: ["canary-1234"]}) == {key: "***"}


@pytest.mark.parametrize("key", ["num_tokens", "max_tokens", "tokenizer", "author", "project", "key", "secretary"])
def test_an_ordinary_key_is_left_alone(key):
    assert redact({key: "some-value"}) == {key: "some-value"}


def test_numbers_are_no_secrets():
    """A metric may be called token/accuracy."""
    record = {"token/accuracy": 0.5, "valid/token": 3, "password": None, "secret": True}
    assert redact(record) == record


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cloning https://me:canary@host:80/x failed", "cloning https://***@host:80/x failed"),
        ("https://canary@host", "https://***@host"),
        ("https://me:can@ary@host/x", "https://***@host/x"),
        ("https://host?who=a@b", "https://host?who=a@b"),
        ("use hf_canarycanary now", "use *** now"),
        ("api_key=canary1", "api_key=***"),
        ("{'api_token': 'canary1', 'x': 1}", "{'api_token': '***', 'x': 1}"),
        ("Authorization: Bearer canarycanary", "Authorization: Bearer ***"),
        ("password: canary1 rest", "password: *** rest"),
        ("https://host/path@x", "https://host/path@x"),
        ("loss 0.5 at step 3", "loss 0.5 at step 3"),
    ],
)
def test_fc7_secrets_inside_of_text(text, shown):
    assert redact(text) == shown


def test_fc7_values_of_the_environment(monkeypatch):
    monkeypatch.setenv("NEPTUNE_API_TOKEN", "canary-neptune")
    monkeypatch.setenv("WANDB_API_KEY", "canary-wandb")
    monkeypatch.setenv("HF_TOKEN", "canary-hub")
    monkeypatch.setenv("MY_PASSWORD", "abc")  # too short: it would blank out parts of words
    text = redact("a canary-neptune, a canary-wandb, a canary-hub, an abc")
    assert text == "a ***, a ***, a ***, an abc"


def test_fc7_secrets_that_were_given():
    given = {"project": "p", "api_tkn": "canary-1", "settings": {"password": ["canary-2", "canary-22"]}, "x": [1, "y"]}
    found = secrets_in(given)
    assert found == ["canary-1", "canary-2", "canary-22"]
    assert redact("canary-1 canary-22 canary-2", found) == "*** *** ***"


def test_the_value_is_not_changed_in_place():
    given = {"api_key": "canary-1", "n": (1, "x")}
    assert redact(given) == {"api_key": "***", "n": (1, "x")}
    assert given["api_key"] == "canary-1"
