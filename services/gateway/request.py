"""The request: one HTTP request to generate, and each output that it asks the workers for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from halfmoon.pb.types_pb2 import PromptLogprob, SamplingParams
from halfmoon.policy.admission.qos_classes import NO_PROMISES, QosClass
from halfmoon.policy.admission.refusal import Refused
from halfmoon.policy.admission.tenants import ANYONE, Tenant
from halfmoon.policy.models.overheads import shared_gaps
from halfmoon.rpc.telemetry.spans import NO_SPAN, Span
from services.gateway.openai.generation_request import NOT_TOKENIZED, GenerationRequest
from services.gateway.openai.sampling import of_output
from services.gateway.openai.served_model import ServedModel
from services.gateway.progress import Progress
from services.gateway.repeatable import RepeatableOutput, RepeatableRequest
from services.gateway.replies.passed_answer import PassedAnswer
from services.gateway.replies.reply_format import Usage
from services.gateway.replies.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One output: what the workers are asked for, the same on every attempt; how far it is; and its text."""

    index: int  # among all outputs of the request
    request_id: str  # its own; workers and the log know the output by it
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    progress: Progress
    text: TextStream
    priority: int = 0  # smaller goes first
    qos: QosClass = NO_PROMISES
    tenant_salt: bytes = b""  # KV is shared among requests of one salt
    tenant: Tenant = ANYONE
    repeat: RepeatableOutput | None = None  # None: nobody can go on with it


@dataclass(slots=True)
class GatewayRequest:
    """One HTTP request on its way through the gateway, filled in stage by stage. Owned by its handler."""

    # known when it arrives
    request_id: str
    endpoint: str
    created_at: datetime
    arrived_s: float  # on the gateway's monotonic clock
    span: Span = NO_SPAN
    tenant: Tenant = ANYONE

    # known once its body is parsed
    model: str = ""  # the name that its answer gives: the model's, or an adapter's
    qos: QosClass = NO_PROMISES
    needs_workers: bool = False  # also False for an echo without output
    priority: int = 0  # the client's, within its class
    has_gaps: bool = False  # asks for more than one token, without doubt
    tenant_salt: bytes = b""  # KV is shared among requests of one salt, which also names the adapter
    repeat: RepeatableRequest | None = None  # None: its client gave it no id
    reply_id: str = ""  # what the id of a response is made of
    is_kept: bool = False  # others may go on from its response
    is_metered: bool = True  # counts towards its tenant's rates
    is_offered: bool = False  # by another gateway

    # known once its prompts are tokenized
    generation: GenerationRequest = NOT_TOKENIZED
    by_prompt: Sequence[Sequence[RequestOutput]] = ()

    num_expected_tokens: float = 0.0  # taken from the tenant's rate

    # known once admission has refused it
    refusal: Refused | None = None
    passed: PassedAnswer | None = None  # where a peer answers it instead

    def begin_outputs(self, generation: GenerationRequest, model: ServedModel) -> None:
        """Takes the tokenized prompts. Each output is a request of its own to the workers."""
        self.generation = generation
        self.by_prompt = [
            [self._output(number * generation.best_of + offset, offset, model) for offset in range(generation.best_of)]
            for number in range(len(generation.prompts))
        ]

    @property
    def outputs(self) -> list[RequestOutput]:
        """The outputs of all prompts, in order."""
        return [output for outputs in self.by_prompt for output in outputs]

    def usage(self) -> Usage:
        """Token counts so far. A prompt counts once however many outputs it has; discarded outputs count, too."""
        if self.passed is not None:
            return self.passed.usage
        leaders = [outputs[0].progress for outputs in self.by_prompt]
        return Usage(
            prompt_tokens=sum(leader.prompt_tokens for leader in leaders),
            cached_tokens=sum(leader.cached_tokens for leader in leaders),
            completion_tokens=sum(output.text.num_tokens for output in self.outputs),
            num_drafts=sum(output.progress.num_drafts for output in self.outputs),
            num_right_drafts=sum(output.progress.num_right_drafts for output in self.outputs),
            num_reasoning_tokens=self._num_reasoning_tokens(),
            timing=self._timing() if self.generation.reply_options.timing else None,
        )

    def _num_reasoning_tokens(self) -> int:
        """Of all outputs, tags included. Where they are no tokens of their own nothing is counted."""
        if self.generation.reasoning_tags is None:
            return 0
        begin, end = self.generation.reasoning_tags
        outputs = [output.progress.output_token_ids[: output.text.num_tokens] for output in self.outputs]
        thoughts = [output for output in outputs if begin is None or begin in output[:1]]
        return sum(output.index(end) + 1 if end in output else len(output) for output in thoughts)

    def _timing(self) -> dict[str, float | None]:
        """Seconds: of the first output's prompt, of all outputs' tokens, and since the request arrived."""
        first, gaps_s = self.outputs[0].progress, self.gaps_s
        return {
            "queue_s": first.queue_s,
            "prefill_s": first.prefill_s,
            "ttft_s": self.ttft_s,
            "tbt_s": sum(gaps_s) / len(gaps_s) if gaps_s else None,
            "e2e_s": max(output.progress.last_token_s for output in self.outputs),
        }

    def prompt_logprobs(self, number: int) -> Sequence[PromptLogprob]:
        """What the worker says of a prompt's tokens after the first, once its first token is there."""
        return self.by_prompt[number][0].progress.prompt_logprobs

    def embedding(self, number: int) -> Sequence[float]:
        """What the worker made of a prompt, once it is computed."""
        return self.by_prompt[number][0].progress.embedding

    @property
    def is_recorded(self) -> bool:
        """Whether it repeats a request that is in the ledger."""
        return self.repeat is not None and self.repeat.is_recorded(len(self.outputs))

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the first token of any output."""
        if self.passed is not None:
            return self.passed.ttft_s
        first_s = (output.progress.ttft_s for output in self.outputs)
        return min((ttft_s for ttft_s in first_s if ttft_s is not None), default=None)

    @property
    def gaps_s(self) -> list[float]:
        """TBT of all outputs."""
        if self.passed is not None:
            return self.passed.gaps_s
        return [gap_s for output in self.outputs for gap_s in output.progress.gaps_s]

    @property
    def shared_gaps_s(self) -> list[float]:
        """The same where tokens that share a message share its wait, so that percentiles are those of tokens."""
        if self.passed is not None:
            return self.passed.gaps_s
        return [gap_s for output in self.outputs for gap_s in shared_gaps(output.progress.gaps_s)]

    @property
    def num_retries(self) -> int:
        """Attempts after the first, of all outputs."""
        return sum(output.progress.num_retries for output in self.outputs)

    def _output(self, index: int, offset: int, model: ServedModel) -> RequestOutput:
        generation, sampling = self.generation, self.generation.sampling
        prompt = generation.prompts[index // generation.best_of]
        return RequestOutput(
            index=index,
            request_id=self.request_id if generation.num_outputs == 1 else f"{self.request_id}-{index}",
            prompt_token_ids=prompt,
            sampling=of_output(sampling, offset, generation.context_tokens - len(prompt)),
            progress=Progress(self.arrived_s, len(prompt)),
            text=TextStream(
                model.new_detokenizer(generation.special_tokens),
                generation.stops,
                sampling.stop_token_ids,
                keep_stop=generation.keep_stop,
                min_tokens=sampling.min_tokens,
            ),
            priority=generation.priority,
            qos=self.qos,
            tenant_salt=self.tenant_salt,
            tenant=self.tenant,
            repeat=None if self.repeat is None else RepeatableOutput(self.repeat, index),
        )
