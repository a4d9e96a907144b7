"""Exchanges between ranks during a step: sums within a stage, hidden states to the next one, logits to rank 0.

Sequence ranks form a ring: each sends to the next and receives from the one before.

Owns one rank's process groups, made without torch.distributed's global default group, so that one process may host
several engines. The CPU's groups are gloo and listen on 127.0.0.1, or where ranks of other hosts reach this one.
**The NCCL groups (CUDA) have not been run.**
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from halfmoon.engine.parallel.grid import Grid
from halfmoon.engine.parallel.joined_ranks import end_silent_connections

Store = Any  # torch.distributed's classes have no public types
_dist: Any = torch.distributed

LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT = timedelta(seconds=60)
_STEP_TIMEOUT = timedelta(minutes=10)  # between the first and the last rank's arrival at one exchange
_LOGITS_TAG, _HIDDEN_TAG, _RING_TAG = 1, 2, 3  # for gloo; NCCL matches by order


def serve_rendezvous(host: str) -> tuple[Store, int]:
    """The store where ranks find each other, and its ephemeral port on `host`. Rank 0 keeps it."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port: int = listener.getsockname()[1]
    store = _dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_CONNECT_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_rendezvous(host: str, port: int) -> Store:
    """Rank 0's store, from another rank."""
    return _dist.TCPStore(host, port, is_master=False, timeout=_CONNECT_TIMEOUT)


class PeerGone(Exception):
    """A broken exchange: another rank's process is gone, or has not answered for minutes."""


class Shift:
    """One exchange of a ring under way. What is sent must stay unchanged until `wait` returns."""

    def __init__(self, received: Tensor, works: Sequence[Any]) -> None:
        self._received = received
        self._works = works

    def wait(self) -> Tensor:
        """What the rank before has sent. Raises PeerGone."""
        for work in self._works:
            _wait(work)
        return self._received


class Links:
    """Owns one rank's groups: its stage's (tensor parallelism), its pipeline's (same tensor rank in all stages), or its
    ring's (sequence parallelism).

    All ranks must make their `Links` at the same time. Methods raise PeerGone.
    """

    def __init__(self, store: Store, grid: Grid, rank: int, device: str, address: str = LOOPBACK) -> None:
        """`address`: an IP address of this host, at which other ranks reach this one."""
        self._stage = stage = grid.stage(rank)
        self._grid = grid
        tensor_rank = grid.tensor_rank(rank)
        self._tensor: Any = None
        self._pipeline: Any = None
        self._ring: Any = None
        self._rank = rank
        if grid.tensor_size > 1:
            self._tensor = _group(
                _dist.PrefixStore(f"tensor-{stage}", store), tensor_rank, grid.tensor_size, device, address
            )
        if grid.pipeline_size > 1:
            name = f"pipeline-{tensor_rank}"
            self._pipeline = _group(_dist.PrefixStore(name, store), stage, grid.pipeline_size, device, address)
        if grid.sequence_size > 1:
            self._ring = _group(_dist.PrefixStore("ring", store), rank, grid.sequence_size, device, address)
        if address != LOOPBACK:
            end_silent_connections()
        self._sent: deque[tuple[Any, Tensor]] = deque()  # not received yet

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums the stage's `x`, in place. On CPUs the sums of a row are the same beside any other rows."""
        size = self._grid.tensor_size
        if x.device.type != "cpu" or size == 2:  # the sum of two has one order
            _wait(self._tensor.allreduce([x]))
            return x
        parts = [torch.empty_like(x) for _ in range(size)]  # gloo adds in an order that depends on an element's place
        _wait(self._tensor.allgather([parts], [x]))
        torch.add(parts[0], parts[1], out=x)
        for part in parts[2:]:
            x += part
        return x

    def gather_logits(self, part: Tensor, vocab_size: int) -> Tensor:
        """Whole logits [num_rows, vocab_size] on all tensor ranks, from each one's [num_rows, its vocabulary]."""
        size = self._grid.tensor_size
        if size == 1:
            return part
        ends = [index * vocab_size // size for index in range(size + 1)]
        widest = -(-vocab_size // size)
        padded = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = [torch.empty_like(padded) for _ in range(size)]
        _wait(self._tensor.allgather([parts], [padded]))
        return torch.cat([padded_part[:, : ends[i + 1] - ends[i]] for i, padded_part in enumerate(parts)], dim=1)

    def send_hidden(self, hidden: Tensor) -> None:
        """Sends hidden states to the next stage. Waits only when that one is `pipeline_size` steps behind."""
        self._send(hidden, self._stage + 1, _HIDDEN_TAG)

    def receive_hidden(self, hidden: Tensor) -> Tensor:
        """Fills `hidden` with the next hidden states of the previous stage."""
        _wait(self._pipeline.recv([hidden], self._stage - 1, _HIDDEN_TAG))
        return hidden

    def send_logits(self, logits: Tensor) -> None:
        """Sends logits from the last stage to the first."""
        self._send(logits, 0, _LOGITS_TAG)

    def receive_logits(self, logits: Tensor) -> Tensor:
        """Fills `logits` on the first stage."""
        _wait(self._pipeline.recv([logits], self._grid.pipeline_size - 1, _LOGITS_TAG))
        return logits

    def shift(self, x: Tensor, received: Tensor) -> Shift:
        """Begins to send `x` to the next rank of the ring and to fill `received` from the one before.

        All ranks shift at the same time. Nothing is exchanged for an empty tensor, which both ends know to be empty.
        """
        size = self._grid.sequence_size
        works = []
        if x.numel():
            works.append(self._ring.send([x], (self._rank + 1) % size, _RING_TAG))
        if received.numel():
            works.append(self._ring.recv([received], (self._rank - 1) % size, _RING_TAG))
        return Shift(received, works)

    def send_rows(self, logits: Tensor) -> None:
        """Sends the logits of a sequence rank's own rows to rank 0."""
        _wait(self._ring.send([logits.contiguous()], 0, _LOGITS_TAG))

    def receive_rows(self, logits: Tensor, rank: int) -> Tensor:
        """Fills `logits` on rank 0 with those of `rank`'s own rows."""
        _wait(self._ring.recv([logits], rank, _LOGITS_TAG))
        return logits

    def abort(self) -> None:
        """Ends exchanges that wait for a dead peer. Any thread. gloo itself notices the end of a process."""
        for group in (self._tensor, self._pipeline, self._ring):
            if isinstance(group, _nccl()):
                group.abort()

    def _send(self, x: Tensor, stage: int, tag: int) -> None:
        x = x.contiguous()
        self._sent.append((self._pipeline.send([x], stage, tag), x))
        while len(self._sent) > self._grid.pipeline_size:
            _wait(self._sent.popleft()[0])


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerGone(str(error)) from error


def _nccl() -> tuple[Any, ...]:
    group = getattr(_dist, "ProcessGroupNCCL", None)
    return () if group is None else (group,)


def _group(store: Store, rank: int, size: int, device: str, address: str) -> Any:
    if torch.device(device).type == "cuda":
        return _nccl_group(store, rank, size)
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = _CONNECT_TIMEOUT
    group = _dist.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(_STEP_TIMEOUT)
    return group


def _nccl_group(store: Store, rank: int, size: int) -> Any:
    """Not run yet: there was no host with two CUDA devices."""
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = _STEP_TIMEOUT
    return _dist.ProcessGroupNCCL(store, rank, size, options)
