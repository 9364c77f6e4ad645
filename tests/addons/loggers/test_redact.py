"""No secret is written down."""

from __future__ import annotations

import pytest

from zae.values.redact import redact, secrets_in


@pytest.mark.parametrize(
    "key",
    ["api_key", "api_token", "api_tkn", "apiKey", "API-KEY", "token", "hf_token", "password", "passwd", "secret",
     "client_secret", "aws_secret_access_key", "accessToken", "WANDB_API_KEY", "credentials", "db.password",
     "auth", "basic_auth", "httpAuth", "Authorization", "cookie", "session-cookies", "pw", "db_pw", "db_pwd",
     "sessionid", "session_id", "JWT", "user_jwt", "ssh_key", "license_key", "licenceKey", "private-key", "signing_key",
     "SSH_KEY",
     "account_key", "slack_webhook", "webhook_url", "sentry_dsn", "connection_string", "smtp_pass", "passcode",
     "apikeys", "api_keys", "passwords", "password_hash", "oauth"],
)  # fmt: skip
def test_text_under_a_secret_key_is_hidden(key):
    assert redact({"a": [{key: "canary-1234"}]}) == {"a": [{key: "***"}]}
    assert redact({key: ["canary-1234"]}) == {key: "***"}


@pytest.mark.parametrize(
    "key",
    [
        "num_tokens",
        "max_tokens",
        "tokenizer",
        "author",
        "project",
        "key",
        "secretary",
        "authors",
        "auth_mode",
        "num_keys",
        "key_dim",
        "keys",
        "sort_key",
        "primary_key",
        "public_key",
        "license",
        "pw_conv",
        "pwd",
        "PWD",
        "OLDPWD",
        "passes",
        "pass",
        "bypass",
        "cookie_policy",
        "SSH_AUTH_SOCK",
        "XAUTHORITY",
        "session",
        "num_sessions",
        "jwtless",
        "dsn",
        "webhooks_enabled",
        "authored_by",
        "keyword",
        "monkey",
        "tokenization",
        "special_tokens",
        "detokenize",
    ],
)
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
        ("Authorization: Basic Y2FuYXJ5OmNhbmFyeQ==", "Authorization: Basic ***"),
        ("{'Authorization': 'token canary123'}", "{'Authorization': 'token ***'}"),
        ("cookie=canary", "cookie=***"),
        ("login with pw=canary, auth: canary", "login with pw=***, auth: ***"),
        ("AccountKey=canary/canary==;EndpointSuffix=x", "AccountKey=***;EndpointSuffix=x"),
    ],
)
def test_secrets_inside_of_text(text, shown):
    assert redact(text) == shown


HEX = "0123456789abcdef" * 2
BODY = "Canary0123456789canary0123456789CANARY"


@pytest.mark.parametrize(
    "token",
    ["AKIA" + "CANARY2345ABCDEF", "ASIA" + "CANARY2345ABCDEF", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjYW5hcnkifQ." + BODY,
     "ghp_" + BODY, "gho_" + BODY, "ghr_" + BODY, "github_pat_" + BODY, "glpat-" + BODY, "hf_" + BODY[:30],
     "sk-" + BODY,
     "sk-proj-" + BODY, "sk-ant-api03-" + BODY, "xoxb-1234-" + BODY, "xapp-1-A0-" + BODY, "sk_" + "live_" + BODY,
     "AIza" + BODY[:35], "GOCSPX-" + BODY, "npm_" + BODY[:36], "pypi-AgEIcHlwaS5vcmc" + BODY, "dapi" + HEX,
     "SG." + BODY[:22] + "." + BODY, "hvs." + BODY, "wandb_v1_" + BODY, "r8_" + BODY[:37],
     "gsk_" + BODY, "nvapi-" + BODY, "sntrys_" + BODY, "shpat_" + HEX, "dop_v1_" + HEX + HEX],
)  # fmt: skip
def test_a_secret_is_told_by_the_prefix_of_its_service(token):
    for text in ("{}", "it failed with {} there", "x={}", "'{}'", "https://host/?q={}", '["{}"]'):
        shown = redact({"note": text.format(token)})["note"]
        assert "***" in shown
        assert "anary" not in shown
        assert token not in shown


@pytest.mark.parametrize(
    "text",
    ["task-parallel-training", "disk-usage-of-the-node", "hf_bert", "asian-languages-v2", "AKIAN is a name", "eyJ",
     "resnet50_large_model_v2", "runs/2024-11-22/seed-0", "lr=0.001, wd=0.1", "sk_learn_baseline", "npm_install",
     "dapi_model", "SGD.momentum.and.nesterov.with.long.names", "step: 3, loss: 0.5", "2024-11-22 10:00:00", "r8_conv",
     "key: value", "sort_key=name", "12345678:ABC", "https://discord.com/api/webhooks", "the author: me", "gelu_new",
     "https://github.com/me/project", "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
     "model.layers.0.self_attn.q_proj.weight", "epoch=3-step=1000.ckpt", "python train.py --max-tokens=4096"],
)  # fmt: skip
def test_ordinary_text_is_left_alone(text):
    assert redact(text) == text
    assert redact({"name": text}) == {"name": text}


def test_the_working_folder_is_not_taken_for_a_password(monkeypatch):
    monkeypatch.setenv("PWD", "/home/me/project")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent.1")
    assert redact("in /home/me/project/runs by /tmp/agent.1") == "in /home/me/project/runs by /tmp/agent.1"


def test_values_of_the_environment(monkeypatch):
    monkeypatch.setenv("NEPTUNE_API_TOKEN", "canary-neptune")
    monkeypatch.setenv("WANDB_API_KEY", "canary-wandb")
    monkeypatch.setenv("HF_TOKEN", "canary-hub")
    monkeypatch.setenv("MY_PASSWORD", "abc")  # too short: it would blank out parts of words
    text = redact("a canary-neptune, a canary-wandb, a canary-hub, an abc")
    assert text == "a ***, a ***, a ***, an abc"


def test_secrets_that_were_given():
    given = {"project": "p", "api_tkn": "canary-1", "settings": {"password": ["canary-2", "canary-22"]}, "x": [1, "y"]}
    found = secrets_in(given)
    assert found == ["canary-1", "canary-2", "canary-22"]
    assert redact("canary-1 canary-22 canary-2", found) == "*** *** ***"


def test_the_value_is_not_changed_in_place():
    given = {"api_key": "canary-1", "n": (1, "x")}
    assert redact(given) == {"api_key": "***", "n": (1, "x")}
    assert given["api_key"] == "canary-1"
