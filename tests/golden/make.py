"""Writes the golden checkpoints of the present format; run it when a format is new: python tests/golden/make.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "storage"))

import test_security
import torch

from kit import hand
from zae.addons import EMAAddon
from zae.storage.manifest import FORMAT


def main() -> None:
    """Two epochs in each format of the weights, and what must be read of them."""
    torch.set_num_threads(1)
    folder = test_security.GOLDEN / f"format-{FORMAT}"
    for kind in ("safetensors", "ckpt"):
        options = {"save_format": kind, "decay": 0.9, "keep_last": 1, "keep_best": 0, "overwrite": True}
        made = test_security.saving(folder / kind, EMAAddon, **options)
        made.run(2, hand.loader())
    weights = {name: value.double().sum().item() for name, value in made.model_state().items()}
    expected = {"progress": made.progress_checker.state_dict(), "weights": weights, "epochs": 2}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
