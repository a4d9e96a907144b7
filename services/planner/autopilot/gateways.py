"""What the gateways show of the cluster, as one observation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from halfmoon.errors import HalfmoonError, Unavailable
from halfmoon.policy.scaling.observation import Observation
from halfmoon.policy.scaling.observed_json import observation_from, of_all_gateways
from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.control_api import ControlApi, control_api

_PATH = "/halfmoon/v1/autopilot/observation"
_CAUTIOUS = ("off", "observe", "act")  # of two modes, the first counts
BY = "autopilot"  # in whose name workers are changed


class Look(NamedTuple):
    """What was seen, and the mode that an operator has set, if any."""

    seen: Observation
    mode: str | None


class _Told(NamedTuple):
    seen: Observation
    mode: str | None
    at_s: float


class Gateways:
    """Owns what each gateway told last: each sees its own requests alone, and all see all workers.

    Several gateways may be behind one address. Each call reaches one of them then.
    """

    def __init__(self, apis: Sequence[ControlApi], window_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._apis = apis
        self._window_s = window_s
        self._clock = clock
        self._told: dict[str, _Told] = {}

    async def look(self, status: Mapping[str, Any]) -> Look:
        """Shows the gateways the autopilot's status and returns what they see. Raises Unavailable if none answers."""
        body = {"seconds": self._window_s, "status": status}
        asked = [api.post(_PATH, body) for api in self._apis]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        now_s, num_gateways = self._clock(), 0
        for answer in answers:
            if isinstance(answer, HalfmoonError):
                continue
            if isinstance(answer, BaseException):
                raise answer
            try:
                told = _Told(observation_from(answer["observation"], now_s), answer["mode"], now_s)
                num_gateways = max(num_gateways, int(answer["num_gateways"]))
                self._told[str(answer["gateway_id"])] = told
            except (KeyError, TypeError, ValueError) as error:
                raise Unavailable(f"a gateway's observation cannot be read: {error!r}") from error
        self._told = {name: told for name, told in self._told.items() if told.at_s > now_s - self._window_s}
        latest = [told for told in self._told.values() if told.at_s == now_s]
        if not latest:
            raise next(error for error in answers if isinstance(error, HalfmoonError))
        others = [told.seen for told in self._told.values() if told is not latest[0]]
        seen = of_all_gateways(latest[0].seen, others, max(num_gateways, len(self._apis)))
        modes = {told.mode for told in latest if told.mode is not None}
        return Look(seen, next((mode for mode in _CAUTIOUS if mode in modes), None))

    async def change_role(self, worker_id: str, role: Role, epoch: int) -> None:
        """Gives a worker another role, unless it was changed since. Raises Unavailable or InvalidRequest."""
        await self._apis[0].change(worker_id, "role", {"role": role, "epoch": epoch})

    async def drain(self, worker_id: str) -> None:
        """Lets a worker finish what it has, and end for good. Raises Unavailable or InvalidRequest."""
        await self._apis[0].change(worker_id, "drain", {"returns": False})


@asynccontextmanager
async def open_gateways(
    urls: Sequence[str], token: str | None, state_dir: Path, ca: Path | None, window_s: int
) -> AsyncIterator[Gateways]:
    """Sessions with the gateways at these URLs. Raises InvalidRequest."""
    async with AsyncExitStack() as stack:
        apis = [
            await stack.enter_async_context(control_api(url, BY, token, state_dir, ca, reconnects=True)) for url in urls
        ]
        yield Gateways(apis, window_s)
