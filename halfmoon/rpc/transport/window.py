"""How many bytes may be in flight on one link, and the transfers that wait to send more."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from halfmoon.errors import DeadlineExceeded, HalfmoonError


@dataclass(slots=True, eq=False)
class Share:
    """One transfer's share of a window."""

    held_bytes: int = 0
    given_back_bytes: int = 0  # in total


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    share: Share
    num_bytes: int
    granted: asyncio.Future[None]


class Window:
    """Owns the bytes in flight on one link. Event-loop thread only.

    A transfer may hold as much as it leaves free (the dynamic threshold of Choudhury and Hahne, 1998, with factor 1):
    alone it gets half of the window, and however many stalled transfers sit on their shares, the next one still finds
    some room. Waiters are served in order of arrival. Only waiters blocked by their own share are passed: a large frame
    that lacks room holds smaller ones back, or they would take all room before it gets enough.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.free_bytes = limit_bytes
        self.given_back_bytes = 0  # in total: grows while the link makes progress
        self._waiting: deque[_Waiter] = deque()

    async def take(self, share: Share, num_bytes: int, stall_s: float) -> None:
        """Waits until `share` may hold `num_bytes` more.

        Raises the error passed to `fail`, and DeadlineExceeded when nothing was given back for `stall_s`, or twice that
        if `share` holds nothing: transfers that hold bytes fail first, as others may wait only for their room.
        DeadlineExceeded also ends a transfer that got nothing back for `stall_s` while others passed it with more than
        was in flight before.
        """
        assert num_bytes <= self.limit_bytes, "a frame that never fits would wait forever"
        waiter = _Waiter(share, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()
        try:
            await self._wait(waiter, stall_s)
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._serve()
            elif not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.give_back(share, num_bytes)  # granted and cancelled in the same turn of the loop
            raise

    def give_back(self, share: Share, num_bytes: int) -> None:
        """Returns bytes that were consumed, or never will be."""
        assert num_bytes <= share.held_bytes
        share.held_bytes -= num_bytes
        self.free_bytes += num_bytes
        share.given_back_bytes += num_bytes
        self.given_back_bytes += num_bytes
        self._serve()

    def fail(self, share: Share, error: HalfmoonError) -> None:
        """Raises `error` in all waiters for more of `share`."""
        for waiter in [waiter for waiter in self._waiting if waiter.share is share]:
            self._waiting.remove(waiter)
            if not waiter.granted.done():
                waiter.granted.set_exception(error)
        self._serve()

    def _serve(self) -> None:
        """Grants what can be granted, longest waiting first."""
        for waiter in list(self._waiting):
            if waiter.share.held_bytes and waiter.share.held_bytes >= self.free_bytes:
                continue
            if waiter.num_bytes > self.free_bytes:
                return
            self._waiting.remove(waiter)
            if not waiter.granted.done():
                self._grant(waiter.share, waiter.num_bytes)
                waiter.granted.set_result(None)

    def _grant(self, share: Share, num_bytes: int) -> None:
        share.held_bytes += num_bytes
        self.free_bytes -= num_bytes

    async def _wait(self, waiter: _Waiter, stall_s: float) -> None:
        share = waiter.share
        own_bytes, all_bytes = share.given_back_bytes, self.given_back_bytes
        while not waiter.granted.done():
            before = self.given_back_bytes
            patience_s = stall_s if share.held_bytes else 2 * stall_s
            await asyncio.wait({waiter.granted}, timeout=patience_s)
            if waiter.granted.done():
                break
            if self.given_back_bytes == before:
                raise DeadlineExceeded(f"the KV link made no progress for {patience_s:g} s")
            if not share.held_bytes or share.given_back_bytes != own_bytes:
                own_bytes, all_bytes = share.given_back_bytes, self.given_back_bytes
            elif self.given_back_bytes - all_bytes >= self.limit_bytes:
                raise DeadlineExceeded(f"a KV transfer made no progress for {stall_s:g} s, while others passed it")
        waiter.granted.result()
