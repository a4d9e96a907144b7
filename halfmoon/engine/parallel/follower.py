"""A follower's process: computes the batches that rank 0 sends, until rank 0 closes the pipe or dies.

Three threads: the main one computes, one copies KV in and out meanwhile, one waits for the end of rank 0, which closes
this process's stdin however it ends. Started by `followers.py` with the file descriptors of two pipes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.parallel.grid import Grid
from halfmoon.engine.parallel.links import LOOPBACK, Links, PeerGone, join_rendezvous
from halfmoon.engine.parallel.messages import (
    Connect,
    CopyKV,
    Failed,
    Hello,
    Ready,
    Setup,
    StageKV,
    Step,
    WriteKV,
    WriteStagedKV,
)
from halfmoon.engine.parallel.rank import StepRank, config_here
from halfmoon.engine.parallel.sequence_rank import load_rank
from halfmoon.errors import HalfmoonError, Incompatible
from halfmoon.kv.staged_shards import StagedShards, rows_of

Pipe = Any  # a Connection; its type parameters differ between Python versions


class StepCount:
    """Owns the number of steps computed so far; any thread may wait for one."""

    def __init__(self) -> None:
        self._done = 0
        self._changed = threading.Condition()

    def add_one(self) -> None:
        """Counts one more computed step."""
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def wait_for(self, num_steps: int) -> None:
        """Returns once `num_steps` steps are computed."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= num_steps)


def follow(
    steps: Pipe,
    copies: Pipe,
    address: str = LOOPBACK,
    model: str | None = None,
    staged: StagedShards | None = None,
) -> None:
    """Runs one follower; returns when `steps` is closed.

    `address`: at which other ranks reach this one. `model`: where it is on this host; None: as on rank 0's. `staged`:
    where it keeps KV for ranks of other workers, on a host of its own.
    """
    setup: Setup = steps.recv()
    checkpoint = _checkpoint(setup, model or setup.model_path)
    steps.send(Hello())
    assert isinstance(steps.recv(), Connect)
    rank = _load(setup, checkpoint, address)
    done = StepCount()
    copier = (steps, copies, rank, setup.rank, done, staged or StagedShards())
    threading.Thread(target=_copy_kv, args=copier, name="kv-copy", daemon=True).start()
    steps.send(Ready())
    while True:
        try:
            step: Step = steps.recv()
        except (EOFError, OSError):
            return
        rank.compute(rank.batch(step.chunks))
        done.add_one()


def _checkpoint(setup: Setup, model: str) -> Checkpoint:
    checkpoint = prepare_checkpoint(model, quantization=setup.quantization)
    if checkpoint.fingerprint != setup.fingerprint:
        raise Incompatible(f"the model in {model} is not the one that the engine started with")
    return checkpoint


def _load(setup: Setup, checkpoint: Checkpoint, address: str) -> StepRank:
    config = config_here(setup.config, setup.rank_here, setup.num_ranks_here)
    grid = Grid(config.tensor_parallel, config.pipeline_parallel, config.sequence_parallel)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if config.device.startswith("cuda"):
        torch.cuda.set_device(config.device)
    links = Links(join_rendezvous(*setup.rendezvous), grid, setup.rank, config.device, address)
    return load_rank(checkpoint, config, grid, setup.rank, links)


def _copy_kv(steps: Pipe, copies: Pipe, rank: StepRank, number: int, done: StepCount, staged: StagedShards) -> None:
    try:
        while True:
            request: CopyKV = copies.recv()
            payload = copies.recv_bytes() if isinstance(request, WriteKV) else None
            done.wait_for(request.after_steps)
            copies.send_bytes(_copied(request, payload, rank, number, staged))
    except (EOFError, OSError):
        return  # rank 0 closed the pipe
    except BaseException as error:
        _fail(steps, error)


def _copied(
    request: CopyKV, payload: bytes | None, rank: StepRank, number: int, staged: StagedShards
) -> bytes | memoryview:
    """Does one copy; returns its answer."""
    blocks, part = request.blocks, request.part
    match request:
        case StageKV(ticket=ticket, place=place):
            rows = rows_of(place, part.num_tokens, rank.memory.read(blocks, part))
            staged.put(ticket, number, place, rows, time.monotonic())
        case WriteStagedKV(ticket=ticket):
            try:
                rank.memory.write(blocks, part, staged.take(ticket, number))
            except HalfmoonError as error:  # of the other worker's ranks: nothing is wrong with this one
                return error.message.encode()
        case WriteKV():
            assert payload is not None
            rank.memory.write(blocks, part, payload)
        case _:
            payload_here: memoryview = rank.memory.read(blocks, part)
            return payload_here
    return b""


def _fail(steps: Pipe, error: BaseException) -> NoReturn:
    """Reports the reason to rank 0 and ends the process: what other ranks wait for will not come."""
    message = error.message if isinstance(error, HalfmoonError) else f"{type(error).__name__}: {error}"
    try:
        steps.send(Failed(type(error).__name__, message))
    finally:
        os._exit(1)


def follow_to_the_end(
    steps: Pipe,
    copies: Pipe,
    address: str = LOOPBACK,
    model: str | None = None,
    staged: StagedShards | None = None,
) -> None:
    """`follow`, where an error is reported to rank 0 and ends the process."""
    try:
        follow(steps, copies, address, model, staged)
    except PeerGone:
        threading.Event().wait()  # another process reports the reason; rank 0 then ends this one
    except BaseException as error:
        _fail(steps, error)


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main() -> None:
    """`python -m halfmoon.engine.parallel.follower STEPS_FD COPIES_FD`."""
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    steps, copies = (Connection(int(number)) for number in sys.argv[1:3])
    follow_to_the_end(steps, copies)
    os._exit(0)  # immediately: nothing is left to write, and no other thread needs an orderly end


if __name__ == "__main__":
    main()
