"""Arguments of Transformers are read from objects, dicts and files, with the names of older versions."""

from __future__ import annotations

import re
import sys
import warnings

import pytest
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from zae.addons.huggingface.arguments import GONE, HERE, OLD_NAMES, OLD_OPTIMIZERS, read_arguments
from zae.errors import ConfigError

CPU = {"use_cpu": True, "report_to": "none"}
OLD_VALUES = {
    "evaluation_strategy": ("epoch", {"eval_strategy": "epoch"}),
    "warmup_ratio": (0.1, {"warmup_steps": 0.1}),
    "no_cuda": (True, {"use_cpu": True}),
    "per_gpu_train_batch_size": (3, {"per_device_train_batch_size": 3}),
    "per_gpu_eval_batch_size": (5, {"per_device_eval_batch_size": 5}),
    "adafactor": (True, {"optim": "adafactor"}),
    "group_by_length": (True, {"train_sampling_strategy": "group_by_length"}),
    "gradient_checkpointing": (True, {"activation_checkpointing": True}),
    "gradient_checkpointing_kwargs": ({"a": 1}, {"activation_checkpointing_kwargs": {"a": 1}}),
    "include_inputs_for_metrics": (True, {"include_for_metrics": ["inputs"]}),
    "push_to_hub_model_id": ("me/it", {"hub_model_id": "me/it"}),
    "push_to_hub_token": ("secret", {"hub_token": "secret"}),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_says_the_same_with_a_warning(name, tmp_path):
    """Row 36: each is accepted in a dict, and the warning has what to write now."""
    value, expected = OLD_VALUES[name]
    given = {"output_dir": str(tmp_path), **CPU, name: value}
    if name == "no_cuda":
        del given["use_cpu"]
    with pytest.warns(FutureWarning, match=name if value else "") as caught:
        args, entries = read_arguments(given)
    assert entries == {}
    assert {each: getattr(args, each) for each in expected} == expected
    if expected and name[:9] != "gradient_":  # That one is still an argument, which Transformers warns of itself.
        assert f"write {next(iter(expected))}=" in str(caught[0].message)
        assert {each.filename for each in caught} == {__file__}


def test_names_that_are_gone_and_options_of_zae_are_told(tmp_path):
    with pytest.warns(FutureWarning) as caught:
        args, entries = read_arguments({**CPU, **dict.fromkeys(GONE, 1), **dict.fromkeys(HERE, "x")})
    texts = [str(each.message) for each in caught]
    assert entries == dict.fromkeys(HERE, "x")
    assert args.output_dir == "trainer_output"
    for name in GONE:
        assert any(text.startswith(f"{name}=1 has no effect: ") for text in texts)
    for name, here in HERE.items():
        assert f"{name}='x' is of an older Transformers; write {here}" in texts
    for old, new in OLD_OPTIMIZERS.items():
        with pytest.warns(FutureWarning, match=f"optim='{old}' is of an older Transformers; write optim='{new}'"):
            assert read_arguments({**CPU, "optim": old})[0].optim == new


def test_a_file_or_a_dict_gives_the_same_as_the_object(tmp_path):
    """Also what `to_dict` and `to_json_string` wrote, and numbers that YAML reads as text."""
    (tmp_path / "a.yaml").write_text(
        "output_dir: out\nlearning_rate: 5e-5\nnum_train_epochs: 2\nuse_cpu: 'true'\nreport_to: none\nmax_steps: '7'\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args, _ = read_arguments(tmp_path / "a.yaml")
        assert (args.learning_rate, args.num_train_epochs, args.use_cpu, args.max_steps) == (5e-5, 2.0, True, 7)
        assert read_arguments(args) == (args, {})
        args.hub_token = "secret"
        (tmp_path / "a.json").write_text(args.to_json_string())
        again, _ = read_arguments(str(tmp_path / "a.json"))
        assert again.hub_token is None
        args.hub_token = None
        assert again.to_dict() == args.to_dict()
        assert read_arguments({**CPU, "max_steps": 7.0})[0].max_steps == 7
        seq2seq, _ = read_arguments({**CPU, "predict_with_generate": True})
        assert type(seq2seq) is Seq2SeqTrainingArguments


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"learning_rat": 1}, "args has 'learning_rat', which is not an argument of TrainingArguments; did you mean "
                              "'learning_rate'?"),
        ({"model_name_or_path": "x"}, "; arguments of your own classes are read by "
                                      "transformers.HfArgumentParser("),
        ({"max_steps": "many"}, "max_steps='many' is a str; write a whole number"),
        ({"max_steps": 1.5}, "max_steps=1.5 is a float; write a whole number"),
        ({"bf16": "maybe"}, "bf16='maybe' is a str; write True or False"),
        ({"bf16": 1}, "bf16=1 is an int; write True or False"),
        ({"learning_rate": [1]}, "learning_rate=[1] is a list; write a number"),
        ({"learning_rate": True}, "learning_rate=True is a bool; write a number"),
        ({"eval_strategy": "often"}, "TrainingArguments refuses args: "),
        ({"fp16": True, "bf16": True}, "TrainingArguments refuses args: At most one of fp16 and bf16"),
        ({"warmup_ratio": 1.5}, "warmup_ratio=1.5; write warmup_steps, a share of the run"),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "args has warmup_ratio=0.1 and warmup_steps=5; keep warmup_steps"),
        (3, "args is an int; give a transformers.TrainingArguments, a dict of its arguments, or the path"),
        (TrainingArguments, "args is the class itself; give a transformers.TrainingArguments"),
        ("a.toml", "args='a.toml' has the suffix '.toml'; write a .json, .yaml or .yml file"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*older Transformers:FutureWarning")
def test_what_cannot_be_read_is_refused(given, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        read_arguments({**CPU, **given} if isinstance(given, dict) else given)


def test_a_file_that_is_not_a_mapping_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"a.json is a list; give a transformers.TrainingArguments, a dict"):
        read_arguments(path)
    with pytest.raises(FileNotFoundError, match=r"none.json"):
        read_arguments(tmp_path / "none.json")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=re.escape('transformers is not installed: pip install "zae[hf]"')):
        read_arguments({})
