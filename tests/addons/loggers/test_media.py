"""Images, figures and histograms: what is taken, what is refused, and what each sink writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kit.loggers import Task, build, digest, loader
from zae import ConfigError
from zae.addons import JSONLLoggerAddon, StateManagerAddon, TensorBoardLoggerAddon
from zae.addons.loggers.media import figure_pixels, histogram_of, image_pixels
from zae.report.records import read_log

ARRAY = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


def figure_of(width, height, dpi):
    from matplotlib.figure import Figure  # Here, so that only the process that runs this file imports it.

    return Figure(figsize=(width, height), dpi=dpi)


class Shown(Task):
    """Log one of each in the second step of an epoch."""

    def train_step(self, batch):
        if self.progress_checker.epoch_batch == 1:
            self.log_image("valid/samples", ARRAY)
            self.log_histogram("weights", torch.arange(8.0), bins=4)
            figure = figure_of(1, 1, 20)
            figure.subplots().plot([0, 1])
            self.log_figure("curve", figure)
        return super().train_step(batch)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ARRAY, ARRAY),
        (torch.from_numpy(ARRAY).permute(2, 0, 1), ARRAY),
        (torch.from_numpy(ARRAY).permute(2, 0, 1).double() / 255, ARRAY),
        (ARRAY[..., 0], ARRAY[..., :1]),
        (torch.ones(2, 3, dtype=torch.bool), np.full((2, 3, 1), 255, np.uint8)),
        (torch.ones(3, 2, 1, requires_grad=True), np.full((2, 1, 3), 255, np.uint8)),
        (Image.fromarray(ARRAY), ARRAY),
    ],
)
def test_images_become_bytes(given, expected):
    made = image_pixels("a", given)
    assert made.dtype == np.uint8
    assert np.array_equal(made, expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([[0]], "image 'a' is a list; give a tensor, an array or a Pillow image"),
        (torch.zeros(2, 4, 5), r"has the shape \(2, 4, 5\); give \(channels, height, width\) with 1, 3 or 4"),
        (np.zeros((4, 5, 2)), r"has the shape \(4, 5, 2\); give \(height, width, channels\)"),
        (torch.full((4, 5), 2.0), "floats between 2 and 2; scale them to 0..1, or give uint8"),
        (torch.full((4, 5), torch.nan), "floats between nan and nan"),
        (torch.zeros(4, 5, dtype=torch.int64), "has the dtype int64; give uint8, or floats between 0 and 1"),
    ],
)
def test_what_is_not_an_image_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        image_pixels("a", given)


def test_figures_and_histograms():
    figure = figure_of(2, 1, 10)
    canvas = figure.canvas
    assert figure_pixels("a", figure).shape == (10, 20, 4)
    assert figure.canvas is canvas
    counts, edges = histogram_of("a", torch.tensor([0.0, 1.0, torch.nan, torch.inf], dtype=torch.bfloat16), 2)
    assert counts.tolist() == [1, 1]
    assert edges.tolist() == [0.0, 0.5, 1.0]
    for wrong, words in (("text", "is a str; give a tensor"), (torch.zeros(0), "no finite value, of 0")):
        with pytest.raises(ConfigError, match=words):
            histogram_of("a", wrong, 2)
    with pytest.raises(ConfigError, match="figure 'a' is a ndarray; give a matplotlib Figure, or log_image"):
        figure_pixels("a", ARRAY)


def test_what_jsonl_and_tensorboard_write():
    plain = build()
    plain.run(2, loader())
    options = {"jsonl_path": "log.jsonl", "log_dir": "board", "hyperparameters": {"width": 8}}
    trainer = build(JSONLLoggerAddon, TensorBoardLoggerAddon, task=Shown, **options)
    trainer.run(2, loader())
    assert digest(plain) == digest(trainer)
    rows = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert rows[0]["run"]["config"]["hyperparameters"] == {"width": 8}
    images = [row["image"] for row in rows if "image" in row]
    assert [*images[0]] == ["valid/samples"]
    assert np.array_equal(np.asarray(Image.open(images[0]["valid/samples"])), ARRAY)
    assert [row["step"] for row in rows if "histogram" in row] == [1, 5]
    assert next(row["histogram"]["weights"]["counts"] for row in rows if "histogram" in row) == [2, 2, 2, 2]
    records = read_log(Path("log.jsonl"))
    assert (records.unread, records.series["train/loss"].steps) == (0, list(range(1, 9)))
    board = EventAccumulator("board").Reload()
    assert board.Images("valid/samples")[0].width == 5
    assert [event.step for event in board.Images("curve")] == [1, 5]
    histogram = board.Histograms("weights")[0].histogram_value
    assert (histogram.num, histogram.min, histogram.max) == (8, 0, 7)
    assert "_hparams_/session_start_info" in board.summary_metadata


def test_a_resumed_file_has_each_record_once():
    """Images and histograms are not counted among the records of the state."""

    def train(epochs, **more):
        options = {"jsonl_path": "log.jsonl", "save_path": "saved", "resume": "auto", **more}
        build(JSONLLoggerAddon, StateManagerAddon, task=Shown, **options).run(epochs, loader())

    train(1)
    train(3)
    rows = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "histogram" in row] == [1, 5, 9]


def test_a_failing_sink_leaves_images_in_the_local_file(caplog):
    from kit.loggers import ListSink
    from zae.addons.loggers.logger import LoggerAddon

    class Broken(ListSink):
        name = "broken"

        def write(self, metrics, step):
            raise OSError("no")

    class BrokenLoggerAddon(LoggerAddon):
        def sinks(self):
            return [*super().sinks(), Broken()]

    build(BrokenLoggerAddon, task=Shown).run(1, loader())
    (path,) = Path("zae-offline").glob("*.jsonl")
    kinds = [next(key for key in ("image", "histogram", "train/loss") if key in row)
             for row in map(json.loads, path.read_text().splitlines()) if "run" not in row]  # fmt: skip
    assert sorted(set(kinds)) == ["histogram", "image", "train/loss"]
