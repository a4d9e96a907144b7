"""Engines of several ranks on the CPU: gloo, one thread a process, ended with the test module.

Their followers are forks; a test of the followers' processes themselves uses `own_processes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.parallel.followers import LocalFollower
from tests.engine.parallel.forked_follower import ForkedFollower, end_forking

_FOLLOWER = "halfmoon.engine.parallel.followers.LocalFollower"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two cores are shared by up to four ranks; followers inherit the environment."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _forks(_one_thread: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_FOLLOWER, ForkedFollower)
        yield
    end_forking()


@pytest.fixture
def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers are started as an engine starts them."""
    monkeypatch.setattr(_FOLLOWER, LocalFollower)


@pytest.fixture
def start_engine(tiny_checkpoint: Callable[[str], Checkpoint]) -> Iterator[Callable[..., Engine]]:
    """`start_engine(2, 1, "opt")`: tensor and pipeline size and model; closed after the test."""
    engines: list[Engine] = []

    def start(tensor: int = 1, pipeline: int = 1, model: str = "llama", **options: Any) -> Engine:
        engines.append(_engine(tiny_checkpoint(model), tensor, pipeline, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def shared_engine(tiny_checkpoint: Callable[[str], Checkpoint], _forks: None) -> Iterator[Callable[..., Engine]]:
    """`shared_engine(2, 1)`: a Llama's engine without a prefix cache, for tests that leave it as they found it.

    Its `twin` is another one like it.
    """
    engines: dict[tuple[int, int, bool], Engine] = {}

    def share(tensor: int = 1, pipeline: int = 1, twin: bool = False) -> Engine:
        if (tensor, pipeline, twin) not in engines:
            options: dict[str, Any] = {"prefix_cache": False, "max_batch_tokens": 30, "chunk_tokens": 9}
            engines[tensor, pipeline, twin] = _engine(tiny_checkpoint("llama"), tensor, pipeline, **options)
        return engines[tensor, pipeline, twin]

    yield share
    for engine in engines.values():
        engine.close()


def _engine(checkpoint: Checkpoint, tensor: int, pipeline: int, **options: Any) -> Engine:
    settings: dict[str, Any] = {"dtype": "float32", "block_tokens": 8, "num_blocks": 64, "max_running": 8}
    settings |= {"tensor_parallel": tensor, "pipeline_parallel": pipeline, **options}
    return Engine(checkpoint, EngineConfig(**settings))
