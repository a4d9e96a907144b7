"""Rank 0's side of its followers: starts, watches, messages and ends their processes.

Those of other hosts have joined, and are ended by closing their connections.
"""

from __future__ import annotations

import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, Protocol

from halfmoon.engine.parallel.joined_ranks import JoinedRank
from halfmoon.engine.parallel.messages import Connect, CopyKV, Failed, Setup, Step, WriteKV
from halfmoon.errors import HalfmoonError, ServiceFailed, error_classes

_END_PATIENCE_S = 5.0  # from the closed pipe to SIGKILL
_CAUSE_PATIENCE_S = 10.0  # from a broken exchange to the report of which process broke it

OnFailure = Callable[[], None]


class Follower(Protocol):
    """Owns the pipes to one follower, and maybe its process."""

    @property
    def steps(self) -> Any:
        """A connection; see `messages.py`."""

    @property
    def copies(self) -> Any:
        """A connection; see `messages.py`."""

    def kill(self) -> None:
        """Ends the process at once."""

    def end(self, patience_s: float) -> None:
        """Closes the pipes, after which the process ends; one of this host is gone then. Idempotent."""

    def last_state(self) -> str:
        """What became of the process, whose pipe has ended."""


class JoinedFollower:
    """A follower on another host."""

    def __init__(self, rank: JoinedRank) -> None:
        self._rank = rank
        self.steps, self.copies = rank.steps, rank.copies

    def kill(self) -> None:
        """See `Follower.kill`. Its host may be gone, too."""
        self._rank.life.close()

    def end(self, patience_s: float) -> None:
        """See `Follower.end`."""
        self._rank.close()

    def last_state(self) -> str:
        """See `Follower.last_state`."""
        return f"on {self._rank.address_there} was lost"


class LocalFollower:
    """A follower that is a child of this process."""

    def __init__(self) -> None:
        self.steps, far_steps = Pipe()
        self.copies, far_copies = Pipe()
        numbers = (far_steps.fileno(), far_copies.fileno())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "halfmoon.engine.parallel.follower", *map(str, numbers)],
            stdin=subprocess.PIPE,  # never written; its end tells the follower that rank 0 is gone
            pass_fds=numbers,
            start_new_session=True,  # a Ctrl-C or SIGTERM to the group is for rank 0 to handle
        )
        far_steps.close()
        far_copies.close()

    def kill(self) -> None:
        """See `Follower.kill`."""
        self.process.kill()

    def last_state(self) -> str:
        """See `Follower.last_state`."""
        code = self.process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"

    def end(self, patience_s: float) -> None:
        """See `Follower.end`. SIGKILL follows after `patience_s`."""
        for pipe in (self.steps, self.copies, self.process.stdin):
            assert pipe is not None
            pipe.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Followers:
    """Owns all followers. The first that ends takes the others with it: no rank can compute without the rest.

    `broadcast` belongs to the engine's thread, `ask` to any; all raise ServiceFailed once a follower has ended.
    """

    def __init__(self, setups: Sequence[Setup], joined: Sequence[JoinedRank] = ()) -> None:
        """`joined`: the processes of the last setups; the others are started here."""
        self._on_failure: list[OnFailure] = []
        self._error: HalfmoonError | None = None
        self._failed = threading.Event()
        self._gate = threading.Lock()  # guards `_error` and `_on_failure`
        self._copying = threading.Lock()  # one request and its answer at a time
        self._news: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._wake, self._wake_far = Pipe()
        num_here = len(setups) - len(joined)
        processes: list[Follower] = [LocalFollower() for _ in range(num_here)]
        processes += map(JoinedFollower, joined)
        self.by_rank: dict[int, Follower] = {}
        for setup, follower in zip(setups, processes, strict=True):
            self.by_rank[setup.rank] = follower
            with suppress(OSError):  # it is already dead: its watcher will report it
                follower.steps.send(setup)
        self._watcher = threading.Thread(target=self._watch, name="followers", daemon=True)
        self._watcher.start()

    def connect(self) -> None:
        """Tells the followers, once all processes run, to meet and load. Rank 0 makes its own `Links` after this."""
        self._hear_all()
        self._send_all(Connect())

    def wait_until_ready(self) -> None:
        """Returns when all have loaded. Raises what any of them raised."""
        self._hear_all()

    def broadcast(self, step: Step) -> None:
        """Makes every follower compute `step`, after the steps before it."""
        self._send_all(step)

    def ask(self, requests: Mapping[int, tuple[CopyKV, bytes | memoryview]]) -> dict[int, bytes]:
        """Returns each rank's answer to its request (a WriteKV with its payload)."""
        with self._copying:
            try:
                for rank, (request, payload) in requests.items():
                    pipe = self.by_rank[rank].copies
                    pipe.send(request)
                    if isinstance(request, WriteKV):
                        pipe.send_bytes(payload)
                return {rank: self.by_rank[rank].copies.recv_bytes() for rank in requests}
            except (EOFError, OSError):
                raise self.cause() from None

    def check(self) -> None:
        """Raises the reason if the followers are gone."""
        if self._error is not None:
            raise ServiceFailed(self._error.message)

    def cause(self) -> ServiceFailed:
        """The reason why an exchange broke: waits until it is known."""
        if self._error is None and not self._failed.wait(_CAUSE_PATIENCE_S):
            self.fail(ServiceFailed("the followers are alive, but one does not answer"))
        assert self._error is not None
        return ServiceFailed(self._error.message)

    def fail(self, error: HalfmoonError) -> None:
        """Ends computing on all ranks; the first reason counts. Idempotent, any thread."""
        with self._gate:
            if self._error is not None:
                return
            self._error = error
            on_failure = tuple(self._on_failure)
        for follower in self.by_rank.values():
            follower.kill()  # whatever waits for it in an exchange wakes with an error
        self._failed.set()
        self._news.put(error)
        for call in on_failure:
            call()

    def call_on_failure(self, on_failure: OnFailure) -> None:
        """Calls `on_failure`, in addition to others, once, on any thread; immediately after a failure."""
        with self._gate:
            self._on_failure.append(on_failure)
            has_failed = self._error is not None
        if has_failed:
            on_failure()

    def close(self) -> None:
        """Ends all processes; none is alive afterwards. Idempotent."""
        with self._gate:
            self._on_failure.clear()
            self._error = self._error or ServiceFailed("the engine is closed")
        with suppress(OSError):
            self._wake_far.close()
        self._watcher.join()
        self._wake.close()
        patience_s = 0.0 if self._failed.is_set() else _END_PATIENCE_S
        for follower in self.by_rank.values():
            follower.steps.close()
        for follower in self.by_rank.values():
            follower.end(patience_s)

    def _send_all(self, message: object) -> None:
        self.check()
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            for follower in self.by_rank.values():
                follower.steps.send_bytes(data)
        except OSError:
            raise self.cause() from None

    def _hear_all(self) -> None:
        for _ in self.by_rank:
            self._news.get()
            if self._error is not None:
                raise self._error

    def _watch(self) -> None:
        by_pipe = {follower.steps: rank for rank, follower in self.by_rank.items()}
        while True:
            for ready in wait([*by_pipe, self._wake]):
                rank = by_pipe.get(ready)
                if rank is None:
                    return
                word = _next_word(self.by_rank[rank])
                if word is None or isinstance(word, Failed):
                    self.fail(_reason(rank, self.by_rank[rank], word))
                    return
                self._news.put(word)


def _next_word(follower: Follower) -> Any:
    """The next message, or None at the pipe's end."""
    try:
        return follower.steps.recv()
    except (EOFError, OSError):
        return None


def _reason(rank: int, follower: Follower, word: Failed | None) -> HalfmoonError:
    who = f"follower rank {rank}"
    if word is not None:
        error_class = error_classes().get(word.error_class)
        if error_class is not None:
            return error_class(f"{who}: {word.message}")
        return ServiceFailed(f"{who} failed: {word.message}")
    return ServiceFailed(f"{who} {follower.last_state()}")
