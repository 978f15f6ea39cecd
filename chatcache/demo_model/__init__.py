"""The demo model: weights, tokenizer and card (README.md).

The model is small enough for git and for any laptop, so that a chat, a fork, an n-best list or a benchmark works right
after the installation, without a download and without a GPU. `training/` produced it and is not in the wheel.
"""

from __future__ import annotations

import pathlib


def model_path() -> pathlib.Path:
    """Return the folder of the demo model, in the layout of `transformers`."""
    return pathlib.Path(__file__).parent / "model"
