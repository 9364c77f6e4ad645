"""save_model, save_metrics and push_to_hub of HuggingFaceAddon."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from huggingface_hub import HfApi

from kit import hf
from kit.hub import Hub
from kit.ranks import on_ranks
from zae import Trainer
from zae.addons import FSDPAddon, HuggingFaceAddon, JSONLLoggerAddon, MultiGPUAddon, PEFTAddon, StateManagerAddon
from zae.errors import CheckpointError, ConfigError, MissingError

Task = Trainer.add_on(HuggingFaceAddon)
Saving = Trainer.add_on(HuggingFaceAddon, StateManagerAddon)
TOKEN = "hf_SecretSecretSecret"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with Hub() as hub:
        yield hub


def make(kind: Any = Task, head: str = "sequence", count: int = 8, **options: Any) -> Any:
    data = hf.dataset(head, count)
    options = {"train_dataset": data, "eval_dataset": data, "num_train_epochs": 2, "log_bar": False, **options}
    return kind(hf.make_model(head), "cpu", per_device_train_batch_size=4, **options)


def texts(folder: Path) -> str:
    return "".join(each.read_text(errors="ignore") for each in folder.rglob("*") if each.is_file())


def test_folder_loads_and_says_what_it_is(tmp_path: Path) -> None:
    trainer = make(processing_class=hf.tokenizer(), eval_strategy="epoch", metadata={"author": "me"})
    trainer.train()
    assert not trainer.model_exists(tmp_path / "final")
    folder = trainer.save_model(tmp_path / "final", metadata={"note": 7})
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert all(torch.equal(each, loaded.state_dict()[name]) for name, each in trainer.unwrap().state_dict().items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a big cat")["input_ids"] == hf.tokenizer()("a big cat")["input_ids"]
    about = json.loads((folder / "zae.json").read_text())
    assert (about["step"], about["epoch"], about["author"], about["note"]) == (4, 2, "me", 7)
    assert about["model_class"] == "BertForSequenceClassification"
    assert about["metrics"]["eval_loss"] == trainer.test_metrics["loss"]
    assert trainer.model_exists(folder)
    assert transformers.Trainer(loaded, hf.arguments(tmp_path)).evaluate(hf.dataset(count=8))["eval_loss"] == (
        pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-6)
    )


@pytest.fixture
def adapter() -> Any:
    return peft.get_peft_model(hf.make_model(), peft.LoraConfig(r=2, target_modules=["query"]))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@on_ranks(2)
def test_save_model_has_the_same_arguments_with_an_engine(world: int, tmp_path: Path, adapter: Any) -> None:
    """Without a folder it is ``output_dir``, and ``metadata`` is written: sharded, replicated, and of an adapter."""
    kinds = [(FSDPAddon,), (MultiGPUAddon,), (MultiGPUAddon, PEFTAddon)]
    for index, add_ons in enumerate(kinds):
        with_adapter = PEFTAddon in add_ons
        kind = Trainer.add_on(HuggingFaceAddon, *add_ons)
        options = {"train_dataset": hf.dataset(count=8), "num_train_epochs": 1, "output_dir": tmp_path / str(index)}
        trainer = kind(adapter if with_adapter else hf.make_model(), "cpu", log_bar=False, **options)
        trainer.train()
        assert trainer.world_size == world
        folders = [trainer.save_model(), trainer.save_model(tmp_path / f"other-{index}", metadata={"note": index})]
        trainer.barrier()
        assert folders[0] == tmp_path / str(index)
        assert all((each / f"{'adapter_' * with_adapter}model.safetensors").is_file() for each in folders)
        assert json.loads((folders[1] / "zae.json").read_text())["note"] == index


NOT_JSON = {
    "an object": ({"by": object()}, r"metadata\['by'\] is <object"),
    "a set within": ({"data": {"tags": [{"a"}]}}, r"metadata\['data'\]\['tags'\]\[0\] is \{'a'\}"),
    "a path": ({"from": Path("/data")}, r"metadata\['from'\] is PosixPath.*str\(value\)"),
    "a tensor": ({"means": torch.ones(2)}, r"metadata\['means'\] is tensor"),
    "not finite": ({"best": float("nan")}, r"metadata\['best'\] is nan"),
    "a number as a key": ({"labels": {0: "low"}}, r"metadata\['labels'\] has the key 0.*write '0'"),
    "no dict": (["me"], "metadata=.*write a dict"),
}


@pytest.mark.parametrize(("metadata", "said"), NOT_JSON.values(), ids=[*NOT_JSON])
def test_metadata_that_json_cannot_hold_is_refused(metadata: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        make(metadata=metadata)
    with pytest.raises(ConfigError, match=said):
        make().save_model(tmp_path / "final", metadata=metadata)
    assert not (tmp_path / "final").exists()


def test_numbers_of_arrays_are_metadata(tmp_path: Path) -> None:
    folder = make().save_model(tmp_path, metadata={"lr": torch.tensor(0.5), "sizes": (1, [None, True, "x"])})
    about = json.loads((folder / "zae.json").read_text())
    assert (about["lr"], about["sizes"]) == (0.5, [1, [None, True, "x"]])


def test_a_file_takes_no_metadata(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a file holds the weights alone; save a folder"):
        make().save_model(tmp_path / "w.safetensors", metadata={"author": "me"})


def test_file_is_saved_as_before(tmp_path: Path) -> None:
    trainer = make()
    assert trainer.save_model(tmp_path / "w.safetensors").is_file()
    trainer.apply_weights(tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"unknown suffix '\.bin'"):
        trainer.save_model(tmp_path / "model.bin")


def test_generation_configuration_is_saved(tmp_path: Path) -> None:
    folder = make(head="causal").save_model(tmp_path / "gpt")
    assert (folder / "generation_config.json").is_file()
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 3


@on_ranks(2)
def test_sharded_weights_are_saved_whole(world: int, tmp_path: Path) -> None:
    for kind in (FSDPAddon, MultiGPUAddon):
        trainer = make(Trainer.add_on(HuggingFaceAddon, kind), seed=1)
        trainer.train()
        assert trainer.world_size == world
        folder = trainer.save_model(tmp_path / kind.__name__)
        trainer.barrier()
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
        for name, each in trainer.model_state().items():
            assert torch.equal(each, loaded[name])
    one, other = (tmp_path / kind.__name__ / "zae.json" for kind in (FSDPAddon, MultiGPUAddon))
    assert json.loads(one.read_text())["step"] == json.loads(other.read_text())["step"] == 2


def test_files_of_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(output_dir=tmp_path / "out")
    found = trainer.evaluate()
    trainer.save_metrics("eval", found)
    trainer.save_metrics("test", trainer.predict(hf.dataset(count=4)).metrics)
    trainer.log_metrics("eval", found)
    saved = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert saved["eval_loss"] == found["eval_loss"]
    assert "test_loss" in saved
    assert "***** eval metrics *****" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"save_metrics needs a folder.*output_dir"):
        make().save_metrics("eval", found)


def test_checkpoints_are_in_the_output_folder(tmp_path: Path) -> None:
    trainer = make(Saving, output_dir=tmp_path)
    trainer.train()
    assert trainer.last_path.parent == tmp_path / "checkpoints"
    assert trainer.model_exists(trainer.last_path)
    assert make(Saving, output_dir=tmp_path, save_path=tmp_path / "own").save_path == tmp_path / "own"


def test_save_state_is_that_of_the_state_manager(tmp_path: Path) -> None:
    trainer = make(Saving, output_dir=tmp_path)
    trainer.train()
    path = trainer.save_state()
    assert path.parent == tmp_path / "checkpoints"
    with pytest.raises(MissingError, match="StateManagerAddon"):
        make().save_state()


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="was not saved"):
        make().save_model("/proc/zae")
    with pytest.raises(ConfigError, match=r"save_model needs a folder; write save_model\('folder'\)"):
        make().save_model()


# ------------------------------------------------------------------------------------------------- uploads


def pushing(hub: Hub, folder: Path, kind: Any = Saving, **options: Any) -> Any:
    options = {"hub_model_id": "me/net", "hub_token": TOKEN, "hub_api": HfApi(endpoint=hub.url), **options}
    return make(kind, output_dir=folder, push_to_hub=True, **options)


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_strategies(strategy: str, hub: Hub, tmp_path: Path) -> None:
    trainer = pushing(hub, tmp_path, hub_strategy=strategy, save_every=1, hub_always_push=True)
    trainer.train()
    messages = [each["message"] for each in hub.commits]
    assert messages.count("End of training") == 1
    last = hub.commits[-1]["files"]
    assert last["model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()
    saves = [each for each in messages if each.startswith("Training in progress")]
    assert len({*saves}) == (0 if strategy == "end" else 4)
    folders = {name.partition("/")[0] for each in hub.commits for name in each["files"] if "/" in name}
    expected = {"checkpoint": {"last-checkpoint"}, "all_checkpoints": {f"step-{i:08d}" for i in range(1, 5)}}
    assert folders == expected.get(strategy, set())
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert all(torch.equal(each, loaded.state_dict()[name]) for name, each in trainer.unwrap().state_dict().items())


def test_uploads_do_not_hold_training_up(hub: Hub, tmp_path: Path) -> None:
    steps: list[int] = []

    class Watched(Saving):
        def on_save(self, path: Path) -> None:
            super().on_save(path)
            steps.append(self.progress_checker.step)
            if steps[-1] == 4:
                hub.gate.set()

    hub.gate.clear()
    pushing(hub, tmp_path, Watched, save_every=1).train()
    assert steps == [1, 2, 2, 3, 4, 4]  # The end of an epoch replaces the checkpoint of its last step.
    first, *more, last = hub.commits
    assert (first["message"], last["message"]) == ("Training in progress, step 1", "End of training")
    assert len(more) <= 1, "those of steps 2 and 3 were left out while the first was on its way"
    assert json.loads(first["files"]["zae.json"])["step"] == 1
    assert json.loads(last["files"]["zae.json"])["step"] == 4


def test_failed_uploads_end_no_run(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.fails = 100
    trainer = pushing(hub, tmp_path, save_every=1, hub_always_push=True)
    with caplog.at_level(logging.WARNING, logger="zae"):
        trainer.train()
    assert trainer.progress_checker.step == 4
    assert {each.levelname for each in caplog.records} == {"WARNING"}
    assert [each.getMessage().partition(" was not")[0] for each in caplog.records] == [
        *(f"Training in progress, step {step}" for step in range(1, 5)),
        "End of training",
    ]
    assert "trainer.push_to_hub()" in caplog.records[-1].getMessage()
    with pytest.raises(CheckpointError, match="was not uploaded to me/net"):
        trainer.push_to_hub()
    hub.fails = 0
    assert str(trainer.push_to_hub("again").commit_url).startswith(hub.url)
    assert [each["message"] for each in hub.commits] == ["again"]
    trainer.save_model(tmp_path)
    assert hub.commits[-1]["message"] == "Model save"


def test_error_of_training_leaves_uploads_alone(hub: Hub, tmp_path: Path) -> None:
    class Failing(Saving):
        def on_epoch_end(self) -> None:
            super().on_epoch_end()
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        pushing(hub, tmp_path, Failing).train()
    assert "End of training" not in [each["message"] for each in hub.commits]


def test_token_is_nowhere(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = "plain-secret-value"  # Without the form of a token, which is hidden in any case.
    kind = Trainer.add_on(HuggingFaceAddon, StateManagerAddon, JSONLLoggerAddon)
    trainer = pushing(
        hub, tmp_path, kind, hub_token=token, hub_strategy="all_checkpoints", jsonl_path=tmp_path / "run.jsonl"
    )
    with caplog.at_level(logging.DEBUG):
        trainer.train()
    shown = f"{trainer!r}{trainer.explain()}{vars(trainer)}{caplog.text}"
    assert token not in shown
    assert token not in texts(tmp_path)
    assert hub.tokens == {f"Bearer {token}"}
    hub.fails = 1
    with pytest.raises(CheckpointError) as raised:
        trainer.push_to_hub()
    assert token not in f"{raised.value!r} {raised.value.__cause__} {getattr(raised.value, '__notes__', '')}"
    assert raised.value.__suppress_context__


@on_ranks(2)
def test_only_rank_0_uploads(world: int, tmp_path: Path) -> None:
    class Api(HfApi):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def create_repo(self, repo_id: str, **options: Any) -> None:  # type: ignore[override]
            self.calls.append(repo_id)

        def upload_folder(self, **options: Any) -> None:  # type: ignore[override]
            self.calls.append(options["commit_message"])

    api = Api()
    kind = Trainer.add_on(HuggingFaceAddon, StateManagerAddon, MultiGPUAddon)
    trainer = make(kind, output_dir=tmp_path, push_to_hub=True, hub_api=api, hub_always_push=True)
    trainer.train()
    assert trainer.world_size == world
    if trainer.rank:
        assert api.calls == []
    else:
        assert api.calls[0] == tmp_path.name
        assert "End of training" in api.calls


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="push_to_hub=True uploads output_dir"):
        make(push_to_hub=True)
    with pytest.raises(ConfigError, match=r"hub_strategy='every'.*did you mean 'every_save'"):
        make(hub_strategy="every")
    with pytest.raises(ConfigError, match="metadata=3; write a dict"):
        make(metadata=3)
    trainer = make(output_dir=tmp_path, push_to_hub=True, hub_token=TOKEN)
    assert pickle.loads(pickle.dumps(trainer)).uploader.repo_id == tmp_path.name
