"""Takes over an output that a worker holds: its tokens so far, then those that are still to come."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.errors import HalfmoonError, Unavailable
from halfmoon.pb.decode_pb2 import AdoptRequest
from halfmoon.pb.prefill_pb2 import FirstToken
from halfmoon.pb.types_pb2 import NOT_FINISHED, Token
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.held_answers import HeldAnswer
from services.gateway.cluster.token_router import Adopted, Event, Route, Stopping, TokenArrived, WorkerLost
from services.gateway.request import RequestOutput
from services.gateway.routing.token_flow import TokenFlow, TokenSink
from services.gateway.routing.token_order import TokenOrder, accepted

_ADOPT_S = 10.0


class Adoption:
    """Owns one adoption: its route in the token router, and the duty to end the output on its worker."""

    def __init__(self, cluster: Cluster, output: RequestOutput, held: HeldAnswer) -> None:
        assert output.repeat is not None
        self._cluster = cluster
        self._output = output
        self._repeat = output.repeat
        self._held = held
        self._worker = cluster.worker(held.worker_id)
        self._order = TokenOrder(0)
        self._repeat.adopt(held)
        output.progress.decode_worker = held.worker_id
        output.progress.qos_class = output.qos.name

    async def run(self, sink: TokenSink) -> None:
        """Returns after the last token, or when the sink has enough. Raises the error that ended it.

        Unavailable: the worker holds the answer no longer, or is lost; an attempt may go on.
        """
        request_id = self._held.request_id
        flow = TokenFlow(self._handle)
        route = Route(frozenset((self._held.worker_id,)), flow.put)
        with self._cluster.router.route(request_id, route), self._repeat.request.routed(flow.put):
            call = self._cluster.spawn(self._adopt(route))
            has_ended = False
            try:
                await flow.run(sink)
                has_ended = True
            finally:
                call.cancel()
                self._end(has_ended)

    def _end(self, has_ended: bool) -> None:
        """Settles the output, cancels it, or leaves it on its worker to a repeat."""
        if has_ended:
            self._cluster.ends.settle(self._worker, self._held.request_id)
        elif not self._repeat.is_left(self._cluster.router):
            self._cluster.ends.cancel(self._worker, self._held.request_id)

    def _handle(self, event: Event) -> list[Token]:
        match event:
            case Adopted(answer, tokens, at_s):
                return self._take(answer.first, tokens, at_s)
            case TokenArrived(token, at_s):
                return accepted(self._order, self._output, token, at_s)
            case WorkerLost(_, error):
                raise Unavailable(error.message)
            case Stopping(error):
                raise error
        return []

    def _take(self, first: FirstToken, tokens: Sequence[Token], at_s: float) -> list[Token]:
        held, output = self._held.repeatable, self._output
        wants_prompt = output.sampling.HasField("num_prompt_logprobs")
        if wants_prompt and len(first.prompt_logprobs) != len(output.prompt_token_ids) - 1:
            raise Unavailable("an earlier attempt had the prompt's log-probabilities: the answer is computed again")
        due = self._order.push_together(tokens)
        began_answer = first.token.position == 0  # attempts before it gave no token, and knew of nothing cached
        cached_tokens = first.num_cached_tokens if began_answer else held.cached_tokens
        self._output.progress.note_resumed(first, cached_tokens, [token.token_id for token in due], at_s)
        self._output.progress.note_drafts(due)
        self._repeat.tokens.extend(due)
        return due

    async def _adopt(self, route: Route) -> None:
        """Puts the worker's answer on the route."""
        request = AdoptRequest(request_id=self._held.request_id, gateway_id=self._cluster.gateway_id)
        worker_id = self._held.worker_id
        try:
            async with self._worker.peer.stream(self._worker.decode.Adopt, request, deadline_s=_ADOPT_S) as parts:
                head, *others = [part async for part in parts]
        except HalfmoonError as error:
            route.put(WorkerLost(worker_id, error))
            return
        tokens = [token for part in others for token in part.tokens]
        route.put(Adopted(head, tokens, self._cluster.clock()))
        if head.has_ended and (not tokens or tokens[-1].finish_reason == NOT_FINISHED):
            route.put(WorkerLost(worker_id, Unavailable("the answer that was held is not whole")))
