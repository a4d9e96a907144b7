"""Runs the outputs of one request side by side: of each prompt one first, whose prefix the others find cached.

All of them are admitted before any begins, or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from halfmoon.errors import leaf_errors
from services.gateway.routing.choices import Choice, Choices
from services.gateway.routing.relay import Relay
from services.gateway.routing.request_routing import RequestRouting
from services.gateway.routing.token_flow import TokenSink

SinkOf = Callable[[Choice], TokenSink]


class _Running(NamedTuple):
    choice: Choice
    case: RequestRouting

    async def run(self, relay: Relay, sink: TokenSink) -> None:
        await relay.run(self.case, self.choice.progress, sink)


async def run_choices(relay: Relay, choices: Choices, sink_of: SinkOf) -> None:
    """Returns when all outputs are whole. The first failure ends them all, and is raised."""
    with ExitStack() as open_cases:
        groups = [
            [_Running(one, open_cases.enter_context(relay.case(one.request, one.progress))) for one in of_prompt]
            for of_prompt in choices.by_prompt
        ]
        if len(choices.all) == 1:
            await groups[0][0].run(relay, sink_of(choices.all[0]))
            return
        await relay.admit([[one.case for one in group] for group in groups])
        try:
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    tasks.create_task(_run_prompt(relay, group, sink_of))
        except BaseExceptionGroup as failures:
            raise leaf_errors(failures)[0] from None


async def _run_prompt(relay: Relay, group: Sequence[_Running], sink_of: SinkOf) -> None:
    leader, *followers = group
    begun = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(leader.run(relay, _Noting(sink_of(leader.choice), begun)))
        first.add_done_callback(lambda _: begun.set())
        await begun.wait()
        for one in followers:
            tasks.create_task(one.run(relay, sink_of(one.choice)))


class _Noting:
    """A sink that tells when tokens come: then the prompt's KV is there."""

    def __init__(self, sink: TokenSink, begun: asyncio.Event) -> None:
        self._sink = sink
        self._begun = begun
        self.push = sink.push

    async def begin(self) -> None:
        """Tells."""
        self._begun.set()
        await self._sink.begin()
