"""Folders for from_pretrained, files of metrics, and uploads to a hub on this machine."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from huggingface_hub import HfApi
from torch import nn

from kit.hub import Hub
from zae.addons.huggingface import hub as hf_hub
from zae.addons.huggingface.hub import Push, Uploader
from zae.errors import CheckpointError, ConfigError

TOKEN = "hf_SecretSecretSecret"
ABOUT = {"zae_version": "0", "step": 3, "metrics": {"loss": 0.25}, "base_model": None}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return transformers.BertForMaskedLM(config)  # It has tied weights.


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with Hub() as hub:
        yield hub


def save(folder: Path, model: nn.Module, **more: Any) -> Path:
    return hf_hub.save_folder(folder, model, model.state_dict(), metadata=ABOUT, **more)


def test_folder_loads_with_auto_model(model: Any, tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, hub_token=TOKEN)
    found = save(tmp_path / "out", model, arguments=arguments)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(found)
    assert all(torch.equal(each, loaded.state_dict()[name]) for name, each in model.state_dict().items())
    assert not [each for each in found.iterdir() if each.name.endswith(".bin")], "training_args.bin is a pickle"
    assert json.loads((found / "training_args.json").read_text())["per_device_train_batch_size"] == 8
    assert json.loads((found / "zae.json").read_text())["step"] == 3
    assert TOKEN not in "".join(each.read_text(errors="ignore") for each in found.iterdir())
    assert not [each for each in found.iterdir() if each.name.startswith(".")]


def test_second_save_replaces_the_weights_of_the_first(model: Any, tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"old")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "README.md").write_text("my card")
    save(tmp_path, model)
    names = {each.name for each in tmp_path.iterdir()}
    assert {"notes.txt", "model.safetensors"} <= names
    assert not names & {"model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    assert (tmp_path / "README.md").read_text() == "my card"


def test_plain_module_becomes_one_file(tmp_path: Path) -> None:
    plain = nn.Linear(2, 1)
    save(tmp_path, plain)
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], plain.weight)


def test_folder_that_cannot_be_written_is_refused(model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file, not a directory"):
        save(tmp_path / "file", model)
    with pytest.raises(CheckpointError, match=r"was not saved.*give another path"):
        save(Path("/proc/zae"), model)


def test_model_exists(model: Any, tmp_path: Path) -> None:
    assert not hf_hub.model_exists(tmp_path / "nothing")
    assert not hf_hub.model_exists(tmp_path)
    save(tmp_path, model)
    assert hf_hub.model_exists(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert not hf_hub.model_exists(tmp_path), "a shard is missing"
    (tmp_path / shards["b"]).write_bytes(b"")
    assert hf_hub.model_exists(str(tmp_path))


def test_metrics_are_files_as_in_transformers(tmp_path: Path) -> None:
    hf_hub.save_metrics(tmp_path, "eval", {"eval_loss": 0.5, "eval_f1": torch.tensor(0.25)}, True)
    hf_hub.save_metrics(tmp_path, "test", {"test_loss": 0.75}, True)
    hf_hub.save_metrics(tmp_path, "train", {"train_loss": 1.0}, False)
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"eval_f1": 0.25, "eval_loss": 0.5}
    combined = json.loads((tmp_path / "all_results.json").read_text())
    assert combined == {"eval_f1": 0.25, "eval_loss": 0.5, "test_loss": 0.75}
    with pytest.raises(ConfigError, match="give the dict of evaluate"):
        hf_hub.save_metrics(tmp_path, "eval", [0.5], True)  # type: ignore[arg-type]
    assert hf_hub.log_metrics("eval", {"eval_runtime": 1.5, "eval_loss": 0.123456}).splitlines() == [
        "***** eval metrics *****",
        "  eval_loss    =     0.1235",
        "  eval_runtime = 0:00:01.50",
    ]


@pytest.mark.parametrize(("path", "is_file"), [("a/v1.5", False), ("a/model.bin", True), ("x.safetensors", True)])
def test_suffix_tells_a_file_from_a_folder(path: str, is_file: bool) -> None:
    assert hf_hub.has_file_suffix(path) == is_file


# ------------------------------------------------------------------------------------------------- uploads


def test_upload_creates_the_repository_and_commits_the_files(hub: Hub, model: Any, tmp_path: Path) -> None:
    save(tmp_path, model)
    (tmp_path / "_draft").write_text("hidden")
    (tmp_path / "step-00000001").mkdir()
    uploader = Uploader("me/net", token=TOKEN, private=True, revision="dev", api=HfApi(endpoint=hub.url))
    uploader.upload(Push(tmp_path, "step 1"))
    uploader.upload(Push(tmp_path, "step 2"))
    assert [each["repo"] for each in hub.commits] == ["me/net"] * 2
    assert hub.commits[0]["message"] == "step 1"
    assert hub.commits[0]["revision"] == "dev"
    assert {"config.json", "model.safetensors", "zae.json"} <= {*hub.commits[0]["files"]}
    assert not {each for each in hub.commits[0]["files"] if each.startswith(("_", ".", "step"))}
    assert hub.commits[0]["files"]["model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()
    assert len(hub.made) == 1, "the repository is created once"
    assert hub.made[0]["visibility" if "visibility" in hub.made[0] else "private"] in ("private", True)
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".hub")]


def test_uploads_run_in_the_background_one_after_the_other(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("1")
    uploader = Uploader("me/net", token=TOKEN, api=HfApi(endpoint=hub.url))
    hub.gate.clear()
    uploader.start(Push(tmp_path, "first"))
    assert hub.arrived.acquire(timeout=120)
    assert uploader.is_busy
    (tmp_path / "config.json").unlink()  # Replaced, not overwritten: the upload has the file of its time.
    (tmp_path / "config.json").write_text("2")
    uploader.start(Push(tmp_path, "second"))
    hub.gate.set()
    uploader.finish()
    assert not uploader.is_busy
    assert not copy.deepcopy(uploader).is_busy
    commits = [(each["message"], each["files"]["config.json"]) for each in hub.commits]
    assert commits == [("first", b"1"), ("second", b"2")]


def test_failed_upload_is_a_warning(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text("1")
    uploader = Uploader("me/net", token=TOKEN, api=HfApi(endpoint=hub.url))
    hub.fails = 1
    with caplog.at_level(logging.WARNING, logger="zae"):
        for step in range(2):
            uploader.start(Push(tmp_path, f"step {step}"))
        uploader.finish()
    (record,) = caplog.records
    assert record.getMessage().startswith("step 0 was not uploaded to me/net: ")
    assert "upload it with trainer.push_to_hub()" in record.getMessage()
    assert [each["message"] for each in hub.commits] == ["step 1"]
    assert TOKEN not in caplog.text


def test_uploads_that_have_not_begun_are_left_out_after_an_error(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("1")
    uploader = Uploader("me/net", token=TOKEN, api=HfApi(endpoint=hub.url))
    hub.gate.clear()
    uploader.start(Push(tmp_path, "first"))
    assert hub.arrived.acquire(timeout=120)
    uploader.start(Push(tmp_path, "second"))
    uploader.abandon()
    hub.gate.set()
    uploader.finish()
    assert [each["message"] for each in hub.commits] == ["first"]


def test_checkpoint_is_uploaded_when_it_is_whole(hub: Hub, tmp_path: Path) -> None:
    from kit.checkpoints import save_checkpoint

    (tmp_path / "config.json").write_text("1")
    uploader = Uploader("me/net", "checkpoint", TOKEN, api=HfApi(endpoint=hub.url))
    path = tmp_path / "checkpoints" / "step-00000001"
    uploader.start(Push(tmp_path, "step 1", path, "last-checkpoint"))
    about = {"step": 1, "epoch": 0, "run_id": "r", "composition": [], "world_size": 1}
    save_checkpoint(path, {"a": torch.ones(1)}, {}, manifest_info=about)
    uploader.finish()
    assert "last-checkpoint/manifest.json" in hub.commits[0]["files"]
    uploader.start(Push(tmp_path, "step 2", tmp_path / "gone", "last-checkpoint"))
    uploader.finish()
    assert len(hub.commits) == 1


def test_token_is_in_no_text_and_in_no_error(tmp_path: Path) -> None:
    class Api:
        def create_repo(self, repo_id: str, *, token: str, **options: Any) -> None:
            raise PermissionError(f"401 for Bearer {token}; {options}")

    uploader = Uploader("me/net", token="plain-secret-value", api=Api())
    push = Push(tmp_path, "m")
    with pytest.raises(PermissionError) as raised:
        uploader.upload(push)
    error = uploader.explain(raised.value, push)
    assert "plain-secret-value" not in f"{error!r} {vars(uploader)}"
    assert "401" in str(error)


def test_an_uploader_is_copied() -> None:
    one = Uploader("me/net", transformers.trainer_utils.HubStrategy.ALL_CHECKPOINTS, TOKEN)
    assert one.strategy == "all_checkpoints"
    for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert twin._token.value == TOKEN
