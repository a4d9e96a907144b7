"""A follower's process: computes the batches that rank 0 sends, until rank 0 closes the pipe or dies.

Three threads: the main one computes, one copies KV in and out meanwhile, one waits for the end of rank 0, which closes
this process's stdin however it ends. Started by `followers.py` with the file descriptors of two pipes.
"""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.parallel.grid import Grid
from halfmoon.engine.parallel.links import LOOPBACK, Links, PeerGone, join_rendezvous
from halfmoon.engine.parallel.messages import Connect, CopyKV, Failed, Hello, Ready, Setup, Step, WriteKV
from halfmoon.engine.parallel.rank import StepRank, config_here
from halfmoon.engine.parallel.sequence_rank import load_rank
from halfmoon.errors import HalfmoonError, Incompatible

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


def follow(steps: Pipe, copies: Pipe, address: str = LOOPBACK, model: str | None = None) -> None:
    """Runs one follower; returns when `steps` is closed.

    `address`: at which other ranks reach this one. `model`: where it is on this host; None: as on rank 0's.
    """
    setup: Setup = steps.recv()
    checkpoint = _checkpoint(setup, model or setup.model_path)
    steps.send(Hello())
    assert isinstance(steps.recv(), Connect)
    rank = _load(setup, checkpoint, address)
    done = StepCount()
    threading.Thread(target=_copy_kv, args=(steps, copies, rank, done), name="kv-copy", daemon=True).start()
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


def _copy_kv(steps: Pipe, copies: Pipe, rank: StepRank, done: StepCount) -> None:
    try:
        while True:
            request: CopyKV = copies.recv()
            where = (request.blocks, request.layer_start, request.layer_end, request.start, request.num_tokens)
            payload = copies.recv_bytes() if isinstance(request, WriteKV) else None
            done.wait_for(request.after_steps)
            if payload is None:
                copies.send_bytes(rank.arena.read(*where))
            else:
                rank.arena.write(*where, payload)
                copies.send_bytes(b"")
    except (EOFError, OSError):
        return  # rank 0 closed the pipe
    except BaseException as error:
        _fail(steps, error)


def _fail(steps: Pipe, error: BaseException) -> NoReturn:
    """Reports the reason to rank 0 and ends the process: what other ranks wait for will not come."""
    message = error.message if isinstance(error, HalfmoonError) else f"{type(error).__name__}: {error}"
    try:
        steps.send(Failed(type(error).__name__, message))
    finally:
        os._exit(1)


def follow_to_the_end(steps: Pipe, copies: Pipe, address: str = LOOPBACK, model: str | None = None) -> None:
    """`follow`, where an error is reported to rank 0 and ends the process."""
    try:
        follow(steps, copies, address, model)
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
