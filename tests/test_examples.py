"""The examples outside of the gallery, each run in an empty folder: what they print, and the files they leave."""

from __future__ import annotations

import importlib
import re
import signal
import time
from pathlib import Path

import pytest

from kit.rank_tasks import forks
from kit.scripts import Script, besides_progress

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
EPOCH = r"epoch (\d+)/40, step \d+, train_loss \S+, .*, valid_accuracy [01]\.\d{4}, time .*\n"
SUMMARY = r"(\d+) epochs, [\d,]+ steps, .+; saved: .+\n"
ENDING = (
    r"test accuracy (0\.\d{4}|1\.0000); the curves are in runs/digits/curves\.png\n"
    r"to retrain from scratch, delete runs/digits\n"
)


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """Import here, once, what takes long in each of the forks."""
    importlib.import_module("sklearn.linear_model")


def start(name, seconds=60, batch_sizes=1):
    """Run an example in the present folder; return its output, which is plain text."""
    return plain(*Script(EXAMPLES / name).end(seconds), batch_sizes)[0]


def plain(status, out, err, batch_sizes=1):
    """Both streams of a run that ended well: standard error has the lines of its progress, and each new batch size."""
    lines = besides_progress(err).splitlines()
    changes = [line for line in lines if line.partition(": ")[2].startswith("batch_size of loader=")]
    assert (status, lines) == (0, changes)
    assert len(changes) == batch_sizes - 1
    assert [sign for sign in out + err if sign < " " and sign != "\n"] == []
    return out, err


def matched(pattern, text):
    found = re.fullmatch(pattern, text)
    assert found, f"{text!r} is not {pattern!r}"
    return found.groups()


def test_digits_is_killed_and_goes_on_and_is_finished(tmp_path):
    """Started, killed after its first checkpoint, started again to the end (accuracy >= 0.97), and again.

    Piped, it reports each epoch at once.
    """
    folder = tmp_path / "runs" / "digits"
    first = Script(EXAMPLES / "digits.py")
    deadline = time.monotonic() + 60
    while not list(folder.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    first.signal(signal.SIGKILL)
    status, _, early = first.end()
    assert status == -signal.SIGKILL
    done = len(re.findall(EPOCH, early))
    text, said = plain(*Script(EXAMPLES / "digits.py").end())
    (accuracy,) = matched(ENDING, text)
    (epochs,) = re.findall(SUMMARY, said)
    shown = [int(epoch) for epoch in re.findall(EPOCH, said)]
    assert re.match(rf"resumed from step \d+ \(epoch {shown[0] - 1} of 40\) of runs/digits\n", said)
    assert shown == list(range(shown[0], int(epochs) + 1))
    assert 1 <= shown[0] - 1 <= done  # It continues after the newest checkpoint, not at the start.
    assert float(accuracy) >= 0.97

    from matplotlib.image import imread

    curves = folder / "curves.png"
    height, width, _ = imread(curves).shape
    assert (width, height) == (1200, 456)
    assert len(set(map(bytes, imread(curves)[::4, ::4].reshape(-1, 4)))) > 20  # Something is drawn.

    lines = (folder / "log.jsonl").read_text().splitlines()
    curves.unlink()
    assert matched(ENDING, start("digits.py")) == (accuracy,)
    assert curves.exists()
    assert (folder / "log.jsonl").read_text().splitlines() == lines
    records = [line for line in lines if '"run"' not in line]
    assert len(records) == 2 * int(epochs)  # Training and validation, each epoch once, in spite of the kill.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_usual_is_the_guide_and_a_second_start_finds_nothing_left_to_do(tmp_path, monkeypatch):
    """The script is the guide's first block, chooses its epoch on `valid`, and is resumed."""
    monkeypatch.chdir(tmp_path)
    guide = (EXAMPLES.parent / "docs" / "guide.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", guide, re.S)[1]
    assert (EXAMPLES / "usual.py").read_text(encoding="utf-8").endswith(f'"""\n\n{block}')
    epoch, accuracy = map(float, matched(r"(\d+) (0\.\d+|1\.0)\n", start("usual.py")))
    assert 1 <= epoch <= 20
    assert accuracy >= 0.95
    assert start("usual.py") == f"{epoch:.0f} {accuracy}\n"
    lines = (tmp_path / "runs" / "usual" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    records = [line for line in lines if '"run"' not in line]
    assert len(records) == 2 * 20  # Training and validation, each epoch once.


def test_custom_addon_bites():
    """Where plain SGD stays at one in ten, the add-on's clipping trains."""
    line = r"learning rate 3, clip_ratio {}: test accuracy (0\.\d+)\n"
    without, clipped = map(float, matched(line.format("0.0") + line.format("0.01"), start("custom_addon.py")))
    assert without < 0.5
    assert clipped > 0.9


def test_plain_is_the_hand_written_loop():
    """The bare trainer, validating every epoch, ends with bitwise the weights of the loop by hand."""
    assert start("plain.py") == "9610 weights, bitwise equal to those of the hand-written loop\n"


@pytest.mark.exhaustive
def test_fsdp_trains_a_language_model_in_shards():
    """On two ranks, then one, then three; a model that knows only how frequent each character is has a loss of 3.1."""
    line = r"epoch {} on {} ranks: validation loss (\d\.\d{{3}}), saved in \S+/runs/fsdp/step-000000(\d\d)\n"
    pattern = "".join(line.format(epoch, ranks) for epoch, ranks in ((1, 2), (2, 1), (3, 3)))
    with forks():
        out = start("fsdp.py", batch_sizes=3)  # That of a step stays the same.
    one, first, two, second, three, third = map(float, matched(pattern, out))
    assert 3.3 > one > two > three
    assert three < 2.8
    assert second == 2 * first
    assert third == 3 * first


@pytest.mark.exhaustive
def test_pipeline_trains_a_language_model_in_stages():
    """In two stages, then in four by another schedule; a model that knows only frequencies has a loss of 3.1."""
    line = (
        r"epoch {} in {} stages, (\w+): validation loss (\d\.\d{{3}}), saved in \S+/runs/pipeline/step-000000(\d\d)\n"
    )
    with forks():
        out = start("pipeline.py")
    found = matched("".join(line.format(*each) for each in ((1, 2), (2, 4))), out)
    (first, one, steps), (second, two, more) = found[:3], found[3:]
    assert (first, second) == ("1F1B", "ZBVZeroBubble")
    assert 3.3 > float(one) > float(two)
    assert int(more) == 2 * int(steps)


@pytest.mark.deepspeed
def test_zero_trains_a_language_model_in_each_stage():
    """Needs the extra deepspeed."""
    out = start("zero.py", 240)  # Six ranks import DeepSpeed.
    line = r"epoch {0} in stage {0}: validation loss (\d\.\d{{3}}), saved in \S+/runs/zero/step-000000(\d\d)\n"
    one, first, two, second, three, third = map(float, matched("".join(line.format(each) for each in (1, 2, 3)), out))
    assert 3.3 > one > two > three
    assert three < 2.8
    assert (second, third) == (2 * first, 3 * first)


def test_examples_are_short_and_all_tested():
    """Each has under 125 lines, of at most 88 characters, and a test that names it."""
    names = {path.name for path in EXAMPLES.glob("*.py")}
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name in names if name not in tests] == []
    assert [name for name in names if len((EXAMPLES / name).read_text().splitlines()) >= 125] == []
