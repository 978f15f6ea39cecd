"""Hold the built-in model: weights, tokenizer, card, and the script that made them.

A backend without a model shows nothing. This one is small enough for git and for any laptop, so that a chat, a
fork, an n-best list or a benchmark works right after the installation, without a download and without a GPU.
"""

import pathlib


def model_path() -> pathlib.Path:
    """Return the folder of the built-in model, in the layout of `transformers`."""
    return pathlib.Path(__file__).parent / "model"
