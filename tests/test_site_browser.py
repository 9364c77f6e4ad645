"""The site in a real browser: search, wide and narrow windows, nothing from elsewhere. Needs Chromium and sphinx."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.blocks import DOCS
from kit.browser import Browser

pytestmark = pytest.mark.browser
USUAL_TERMS = {
    "howto/accumulation": ("gradient accumulation", "gradient-accumulation", "accumulate gradients"),
    "howto/resume": (
        "resume",
        "kill",
        "best checkpoint",
        "checkpoint every n steps",
        "resume mid epoch",
        "resume training",
        "checkpointing",
        "checkpoint",
        "best checkpoints",
        "save checkpoint",
    ),
    "engines/data_parallel": ("DDP",),
    "howto/learning_rate": ("warmup", "learning rate finder", "warm-up", "lr finder", "learning rate schedule"),
    "howto/early_stopping": ("early stopping", "early stop", "early-stopping", "early stopping frobnicate"),
    "howto/mixed_precision": ("mixed precision", "mixed-precision"),
    "howto/several_processes": ("multi gpu", "multi-gpu"),
    "features/callbacks": ("callbacks", "callback"),
    "howto/loggers": ("tensorboard", "wandb", "logging"),
    "howto/reproducibility": ("seed", "seeds", "reproducibility", "determinism"),
    "howto/freeze_layers": ("freeze", "freeze layers", "unfreeze"),
    "howto/several_optimizers": ("GAN", "GANs", "multiple optimizers", "gradient penalty"),
    "howto/metrics": ("custom metric", "custom metrics", "confusion matrix", "Dice"),
    "howto/several_losses": ("knowledge distillation",),
    "howto/state_over_batches": ("teacher forcing", "hidden state"),
    "howto/many_runs": ("cross validation", "k-fold", "grid"),
    "howto/samples": ("MC dropout", "uncertainty", "test-time augmentation", "diffusion"),
    "howto/pretrained": ("backbone", "pretrained model", "pretrained", "finetune", "finetuning"),
    "howto/custom_arguments": ("custom arguments", "argparse"),
    "howto/own_checkpoint_storage": ("S3",),
    "howto/reinforcement_learning": ("reinforcement learning",),
    "howto/nan": ("gradient clipping", "clip gradients", "nan loss"),
    "howto/clusters": ("slurm",),
    "features/peft": ("lora", "peft"),
    "engines/fsdp": ("fsdp", "fsdp2"),
    "features/search": ("hyperparameter search", "hyperparameters search"),
    "howto/predictions": ("predict", "prediction"),
    "howto/out_of_memory": ("out of memory", "OOM"),
    "howto/averaged_weights": ("ema",),
    "engines/tensor_parallel": ("tensor parallel",),
    "engines/deepspeed": ("deepspeed",),
    "features/compile": ("torch.compile",),
    "howto/speed": ("profiler",),
    "howto/docker": ("docker",),
    "howto/streams": ("streaming", "IterableDataset", "validation every n steps"),
    "howto/fine_tune": ("fine-tune",),
    "moving/programs": ("nanoGPT", "pytorch examples", "accelerate examples", "nlp_example"),
}
"""What people type into the search of a trainer's site, and other forms of it, by the page that answers it."""

PAGES = ("index", "howto/resume", "reference/addons/EMAAddon", "reference/api/trainer", "explanation/composition")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``.ci/run`` does: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", DOCS, folder]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


def check(browser: Browser) -> None:
    """No error on the console, and every request is for a file of the site."""
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith("file://")] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_window(site: Path, browser: Browser, name: str, width: int, scheme: str) -> None:
    """The page does not scroll sideways: wide tables and code do so in their own boxes; no picture is missing."""
    browser.open(site / f"{name}.html", width, 900, scheme, ready="true")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    missing = "[...document.images].filter((each) => each.offsetParent && !each.naturalWidth).length"
    assert browser.evaluate(missing) == 0
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    check(browser)


def test_nothing_is_cut_at_1280_pixels(site: Path, browser: Browser) -> None:
    """On no page a block of code, or the page itself, is wider than its box."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 100
    cut = "[...document.querySelectorAll('pre')].filter((each) => each.scrollWidth > each.clientWidth + 1)"
    found = []
    for page in pages:
        browser.open(page, 1280, ready="true")
        blocks = browser.evaluate(f"{cut}.map((each) => each.textContent.slice(0, 80))")
        if blocks or browser.evaluate("document.documentElement.scrollWidth") > 1280:
            found.append((str(page.relative_to(site)), blocks))
    assert found == []


@pytest.mark.parametrize(
    ("query", "expected"),
    [("find_batch_size", "reference/api/tuning.html"), ("EMAAddon", "reference/addons/EMAAddon.html")],
)
def test_the_search_finds_a_public_name(site: Path, browser: Browser, query: str, expected: str) -> None:
    """Typed into the field of the first page, from files and without a server."""
    browser.open(site / "index.html", ready="true")
    browser.evaluate("document.querySelector('input[name=q]').focus()")
    for letter in query:
        browser.key(letter)
    browser.evaluate("document.querySelector('input[name=q]').form.submit()")
    browser.wait("location.pathname.endsWith('/search.html') && !!document.querySelector('#search-results li a')")
    browser.wait(f"[...document.querySelectorAll('#search-results li a')].some((a) => a.href.includes('{expected}'))")
    check(browser)


def test_the_search_shows_the_page_about_a_usual_term_first(site: Path, browser: Browser) -> None:
    """Ranked by the search and the scorer of the site, as its page of results does."""
    browser.open(site / "search.html", ready="true")
    load = "document.head.append(Object.assign(document.createElement('script'), {src: 'searchindex.js'}))"
    browser.evaluate(f"void {load}")
    browser.wait("!!Search._index")
    wrong = {}
    for page, queries in USUAL_TERMS.items():
        for query in queries:
            browser.evaluate(f"history.replaceState(null, '', '?q=' + encodeURIComponent({json.dumps(query)}))")
            found = f"Search._performSearch(...Search._parseQuery({json.dumps(query)})).map((each) => each[0])"
            first = (browser.evaluate(found) or [""])[-1]
            if first != page:
                wrong[query] = f"{first}, and not {page}"
    assert wrong == {}
