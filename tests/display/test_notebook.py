"""The display in notebooks, in a kernel: one output a run, updated in place; and the notebooks of examples/."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from zae import ConfigError
from zae.display.html import chart, metrics_html
from zae.loop.metric_rows import Metrics, MetricsDict

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
TASK = """
import sys, torch
from zae import Trainer
from zae.display.notebook import Notebook
Notebook.interval = 0.0  # Each step is drawn.
class Task(Trainer):
    def train_step(self, batch):
        if self.progress_checker.step == self.fails:
            raise self.error
        return {"loss": self.model(batch).square().mean(), "<b>": 1.0}
    test_step = train_step
    fails = -1
def build(**options):
    model = torch.nn.Linear(2, 1)
    return Task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.01), **options)
batches = [torch.ones(8, 2)] * 4
"""
RANKS = """
import pathlib, tempfile
folder = tempfile.mkdtemp()
pathlib.Path(folder, "own_task.py").write_text('''
from zae import Trainer
class Task(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean(), "rank": self.rank}
    test_step = train_step
''')
sys.path.insert(0, folder)
from own_task import Task as OwnTask
from zae.addons import MultiGPUAddon
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.ones(24, 2), batch_size=2)
OwnTask.add_on(MultiGPUAddon)(model, ["cpu", "cpu"], optimizer=optimizer).run(3, loader)
"""
SHIFT_TAB = """
from zae.addons import AMPAddon, EMAAddon
Composed = Task.add_on(EMAAddon, AMPAddon)
print(get_ipython().kernel.do_inspect("Composed(", 9, detail_level=0)["data"]["text/plain"])
"""
CELLS = (
    TASK,
    "metrics = build().run(3, batches, batches[:1])",
    "build().run(2, batches)",
    "build(log_bar=False).run(1, batches)\nNone",
    "metrics",
    "t = build(); t.fails, t.error = 6, KeyboardInterrupt()\nt.run(3, batches)",
    "t.fails = -1\nt.run(1, batches)",
    "t = build(); t.fails, t.error = 6, ValueError('bad <i>')\nt.run(3, batches)",
    "t",
    "for _ in range(2): build().run(1, batches)",
    "assert 'ipywidgets' not in sys.modules",
    SHIFT_TAB,
)


def execute(texts: Sequence[str]) -> tuple[list[list[Any]], dict[int, int]]:
    """Return the outputs of cells in a new kernel, and the number of the updates of each."""
    import nbformat
    from nbclient import NotebookClient

    updates: dict[int, int] = {}

    class Counted(NotebookClient):
        def process_message(self, message: Any, cell: Any, index: int) -> Any:
            if message["msg_type"] == "update_display_data":
                updates[index] = updates.get(index, 0) + 1
            return super().process_message(message, cell, index)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
    client = Counted(notebook, timeout=600, kernel_name="python3", allow_errors=True)
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [cell.outputs for cell in notebook.cells], updates


@pytest.fixture(scope="module")
def shown() -> tuple[list[list[Any]], dict[int, int]]:
    return execute(CELLS)


def of(shown: Any, text: str) -> list[Any]:
    """The outputs of one of the cells above."""
    found: list[Any] = shown[0][CELLS.index(text)]
    return found


def test_a_run_has_one_output_that_is_updated(shown: Any) -> None:
    """Its text is the table of a terminal; names are escaped; no bar is left; nothing is written to a stream."""
    outputs, updates = shown
    (output,) = outputs[1]
    assert output.output_type == "display_data"
    assert updates[1] >= 12, "each step is drawn in place"
    text, page = output.data["text/plain"], output.data["text/html"]
    assert text.splitlines()[1].split()[:3] == ["epoch", "step", "train_loss"]
    assert [line.split()[:2] for line in text.splitlines()[2:]] == [["1", "4"], ["2", "8"], ["3", "12"]]
    assert page.count("<svg") == 2
    assert "&lt;b&gt;" in page
    assert "<progress" not in page
    silent = [of(shown, text) for text in CELLS if text != SHIFT_TAB]  # That cell prints.
    assert not {each.output_type for cell in silent for each in cell} & {"stream"}
    for text in ("assert 'ipywidgets' not in sys.modules", "build(log_bar=False).run(1, batches)\nNone"):
        assert of(shown, text) == []


def test_metrics_show_their_curves_and_table(shown: Any) -> None:
    """A run that ends a cell is not shown twice; two runs in a cell have an output each."""
    (result,) = of(shown, "metrics")
    assert "<polyline" in result.data["text/html"]
    assert "</table>" in result.data["text/html"]
    assert "train_loss" in result.data["text/plain"]
    live, short = of(shown, "build().run(2, batches)")
    assert "<svg" in live.data["text/html"]
    assert "shown above" in short.data["text/html"]
    assert len(of(shown, "for _ in range(2): build().run(1, batches)")) == 2


@pytest.mark.exhaustive
def test_ranks_are_shown_in_the_cell_that_started_them() -> None:
    """The output of rank 0 is drawn by the kernel, once; the metrics are not drawn again; nothing goes to a stream."""
    (_, (live, short)), updates = execute((TASK, RANKS))
    assert live.output_type == "display_data"
    assert [line.split()[:2] for line in live.data["text/plain"].splitlines()[2:]] == [
        ["1", "6"],
        ["2", "12"],
        ["3", "18"],
    ]
    assert "3 epochs, 18 steps" in live.data["text/html"]
    assert "0.5" in live.data["text/html"], "the mean rank of two ranks"
    assert "shown above" in short.data["text/html"]
    assert updates[1] >= 1


def test_a_run_that_ends_early_leaves_its_table_and_the_error(shown: Any) -> None:
    for text, said in ((CELLS[5], "KeyboardInterrupt"), (CELLS[7], "ValueError: bad &lt;i&gt;")):
        output, error = of(shown, text)
        assert f"ended in epoch 2, step 7 by {said}" in output.data["text/html"]
        assert [line.split()[:2] for line in output.data["text/plain"].splitlines()[2:4]] == [["1", "4"], ["2", "6"]]
        assert error.output_type == "error"
    rest = of(shown, CELLS[6])[0].data["text/plain"].splitlines()[2:]
    assert [line.split()[:2] for line in rest] == [["1", "4"], ["2", "8"]], "it ended in epoch 2, which run(1) finishes"


def test_a_trainer_shows_where_it_stands(shown: Any) -> None:
    text = of(shown, "t")[0].data["text/plain"]
    assert text.startswith("Task(model=Linear")
    assert "epoch=1, step=6" in text


@pytest.mark.exhaustive
def test_the_notebooks_of_the_examples_run() -> None:
    """Three notebooks, each with one output for each run; the last of them shows add-ons, a plan and the loop."""
    import nbformat

    paths = sorted(FOLDER.glob("*.ipynb"))
    assert len(paths) == 3
    outputs: list[Any] = []
    for path in paths:
        outputs += execute([cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"])[0]
    errors = [each for cell in outputs for each in cell if each.output_type in ("error", "stream")]
    assert [each.get("name", each.output_type) for each in errors] == ["stdout"]
    assert errors[0].text == "8 8\n"
    live = [each for cell in outputs for each in cell if each.output_type == "display_data"]
    assert len(live) == 3
    values = [each.data["text/plain"] for cell in outputs for each in cell if each.output_type == "execute_result"]
    assert float(values[0]) >= 0.85
    names = "EarlyStoppingAddon, EMAAddon, GradientAccumulationAddon"
    assert outputs[-1][0].data["text/plain"].startswith(f"Digits[{names}](model=Sequential, ")


def test_frames_need_pandas(monkeypatch: Any) -> None:
    """The rows of a run; what is missing is NaN. Without pandas the error says what to install."""
    metrics = MetricsDict(
        train_metrics_history=[Metrics(epoch=1, step=2, train_loss=0.5)],
        valid_metrics_history=[Metrics(epoch=1, step=1, valid_loss=0.25)],
    )
    frame = metrics.to_frame()
    assert list(frame.columns) == ["epoch", "step", "train_loss", "valid_loss"]
    assert frame["train_loss"].isna().tolist() == [True, False]
    assert list(MetricsDict().to_frame().columns) == ["epoch", "step"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        metrics.to_frame()


def test_long_runs_are_drawn_in_few_points() -> None:
    """10,000 epochs with NaN among them: at most 60 rows, and curves of at most 301 points, with the last one."""
    rows = [{"epoch": at, "step": at, "train_loss": 1 / at if at % 7 else float("nan")} for at in range(1, 10001)]
    page = metrics_html(rows, [""] * len(rows))
    assert "9,940 rows are not shown" in page
    points = re.search(r"points='([^']*)'", page)
    assert points is not None
    places = points[1].split()
    assert 200 < len(places) <= 301
    assert places[-1] == "312.0,130.0"
    assert len(page) < 40_000
    assert "nan" not in points[1]


def test_shift_tab_shows_the_options_of_all_add_ons(shown: Any) -> None:
    """What the kernel answers to Shift-Tab: options with type and default, and what each add-on does."""
    (output,) = of(shown, SHIFT_TAB)
    text = re.sub(r"\x1b\[[\d;]*m", "", output["text"])
    assert text.startswith("Init signature:\nComposed(\n    model: ")
    for option in (
        "decay: \"Annotated[float, Interval('[0, 1)')",
        "loss_scale: 'tuple[float, float]' = (65536.0, 1.0)",
        "seed: 'Seed | None'",
    ):
        assert f"    {option}" in text
    assert text.index("decay") < text.index("log_bar")
    assert "- EMAAddon: Average the weights" in text
    assert "args" not in text


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.234e-7, 1.234e-7), (123456.7, 9876543.2), (-1e20, 1e20)])
def test_the_labels_of_an_axis_are_in_the_picture(low: float, high: float) -> None:
    """A letter of 11 pixels is about 6 wide."""
    drawn = chart("loss", {"train": [(1, low), (2, high)]})
    labels = re.findall(r"<text x='(\d+)' y='\d+' text-anchor='end'[^>]*>([^<]+)</text>", drawn)
    assert len(labels) >= 2
    assert all(int(x) >= 6 * len(text) for x, text in labels)
    assert all(float(x) >= int(labels[0][0]) for x in re.findall(r"cx='([\d.]+)'", drawn))
