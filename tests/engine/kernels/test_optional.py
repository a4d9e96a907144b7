"""The engine imports where triton is not installed; a kernel's module says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import halfmoon.engine.engine, halfmoon.engine.model_runner, halfmoon.engine.kernels
try:
    import halfmoon.engine.kernels.silu_mul
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_the_engine_imports_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "triton"), done.stderr
