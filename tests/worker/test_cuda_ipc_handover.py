"""A hand-over through device memory gives the reference tokens. The device is a CPU here, its kernels interpreted."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.kv_memory.cuda_memory import CudaRegion
from halfmoon.errors import Incompatible
from halfmoon.pb import prefill_pb2
from halfmoon.rpc.transport.cuda_ipc import DeviceRegion
from tests.worker.conftest import RunningWorker
from tests.worker.test_handover import generation, listening, prefilled, reference, tokens_of

pytest.importorskip("triton", reason="triton is missing (extra `gpu`)")
from tests.engine.kernels.conftest import HAS_GPU  # isort: skip  (chooses the interpreter where there is no GPU)

Start = Callable[..., Awaitable[RunningWorker]]
DEVICE = "cuda" if HAS_GPU else "cpu"
TRANSPORTS = ("cuda_ipc", "shm")


@pytest.fixture(autouse=True)
def _one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps where it is in a global; here the threads of two workers use it."""
    from triton.runtime.interpreter import GridExecutor

    run, lock = GridExecutor.__call__, threading.RLock()

    def alone(*arguments: Any, **options: Any) -> Any:
        with lock:
            return run(*arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", alone)


class OneProcess:
    """Device memory whose other end is in this process, where CUDA itself would open nothing."""

    def __init__(self, *, opens: bool) -> None:
        self._opens = opens
        self._regions: list[CudaRegion] = []

    def allocate(self, num_bytes: int) -> tuple[DeviceRegion, bytes]:
        self._regions.append(CudaRegion(torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)))
        return self._regions[-1], b"%d" % (len(self._regions) - 1)

    def open(self, exported: bytes) -> DeviceRegion:
        if not self._opens:
            raise Incompatible("not here")
        return self._regions[int(exported)]


def handed_in(worker: RunningWorker) -> float:
    return float(worker.metrics.handover_bytes.labels("in")._value.get())


@pytest.mark.parametrize(("opens", "num_fallbacks"), [(True, 0), (False, 1)], ids=["cuda_ipc", "falls back"])
async def test_the_reference_tokens(start_worker: Start, tiny: Checkpoint, opens: bool, num_fallbacks: int) -> None:
    prompt = [(7 * i + 3) % 125 + 3 for i in range(21)]
    device = OneProcess(opens=opens)
    prefill, decode = [
        await start_worker(role, transports=TRANSPORTS, device=device, attention="triton")
        for role in ("prefill", "decode")
    ]
    async with listening(decode) as steps:
        request = prefill_pb2.PrefillRequest(generation=generation(tiny, prompt, 6), decode_address=decode.peer.address)
        first, done = await prefilled(prefill, request)
        tokens = [first.first_token.token.token_id, *await tokens_of(steps)]
    assert tokens == reference(tiny, prompt, 6)
    assert done.handed_over.kv_bytes == len(prompt) * decode.engine.layout.token_bytes == handed_in(decode)
    assert bool(device._regions[0].part(0, 4096).cells.any()) is opens  # type: ignore[attr-defined]
    assert prefill.metrics.kv_fallbacks.labels("cuda_ipc")._value.get() == num_fallbacks
