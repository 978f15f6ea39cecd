"""Write random bf16 weights of the SmolLM2-135M shape: `chatcache_model.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from chatcache.bench.shapes import SHAPES, write_model

write_model(SHAPES["smollm2-135m"], Path(sys.argv[1]))
