"""In what order the outputs of one request begin: a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from services.gateway.routing.token_flow import NotifyingSink, TokenSink

MOST_BEGINNING = 64  # outputs of one request that wait for their first tokens

RunOutput = Callable[[TokenSink], Coroutine[None, None, None]]


class OutputTurns:
    """Owns which outputs of one request wait for their first tokens, and that the others wait until these have them.

    So a request of a thousand outputs does not fill the workers' queues, and its outputs are placed by what is known
    when they begin.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        """Outputs run in `tasks`."""
        self._tasks = tasks
        self._places = asyncio.Semaphore(MOST_BEGINNING)
        self._turn = asyncio.Lock()
        self.has_begun = False  # whether any output has tokens

    async def begin(self, run: RunOutput, sink: TokenSink) -> asyncio.Future[None]:
        """Runs an output in its turn. The future ends with its first token, or with the output.

        One output begins in a round of the event loop, so that placements of many hold up nobody else.
        """
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def note_begun() -> None:
            self.has_begun = True
            if not begun.done():
                begun.set_result(None)

        async with self._turn:
            await self._places.acquire()
            begun.add_done_callback(lambda _: self._places.release())
            task = self._tasks.create_task(run(NotifyingSink(sink, note_begun)))
            task.add_done_callback(lambda _: note_begun())
            await asyncio.sleep(0)
        return begun
