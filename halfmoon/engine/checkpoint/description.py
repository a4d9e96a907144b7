"""`python -m halfmoon.engine.checkpoint.description MODEL DIRECTORY`: what a gateway needs of a model.

The model's directory without its weights, and the fingerprint of these: a few MB, which need neither PyTorch nor
transformers to be read, whatever the model was.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.checkpoint.fingerprint import FINGERPRINT_FILE

_WEIGHTS = ("*.safetensors", "*.blocks", "*.bin", "*.gguf", "*.pth", "*.pt")


def describe(checkpoint: Checkpoint, target: Path) -> None:
    """Writes `target`, which must not exist. Links are followed."""
    shutil.copytree(checkpoint.path, target, ignore=shutil.ignore_patterns(*_WEIGHTS))
    (target / FINGERPRINT_FILE).write_text(checkpoint.fingerprint, encoding="ascii")


if __name__ == "__main__":
    describe(prepare_checkpoint(sys.argv[1], on_progress=print, for_any_engine=True), Path(sys.argv[2]))
