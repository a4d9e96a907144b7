"""Runs the outputs of one request side by side: of each prompt one first, whose prefix the others find cached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from halfmoon.errors import leaf_errors
from services.gateway.choices import Choice, Choices
from services.gateway.relay import Relay
from services.gateway.token_flow import TokenSink

SinkOf = Callable[[Choice], TokenSink]


async def run_choices(relay: Relay, choices: Choices, sink_of: SinkOf) -> None:
    """Returns when all outputs are whole. The first failure ends them all, and is raised."""
    if len(choices.all) == 1:
        await _run(relay, choices.all[0], sink_of(choices.all[0]))
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for group in choices.by_prompt:
                tasks.create_task(_run_prompt(relay, group, sink_of))
    except BaseExceptionGroup as failures:
        raise leaf_errors(failures)[0] from None


async def _run_prompt(relay: Relay, group: Sequence[Choice], sink_of: SinkOf) -> None:
    leader, *followers = group
    begun = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(_run(relay, leader, _Noting(sink_of(leader), begun)))
        first.add_done_callback(lambda _: begun.set())
        await begun.wait()
        for choice in followers:
            tasks.create_task(_run(relay, choice, sink_of(choice)))


async def _run(relay: Relay, choice: Choice, sink: TokenSink) -> None:
    await relay.run(choice.request, choice.progress, sink)


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
