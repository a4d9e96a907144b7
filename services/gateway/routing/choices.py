"""The outputs of one HTTP request: each prompt's, side by side, and what they are together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.policy.admission.classes import NO_PROMISES, QosClass
from services.gateway.openai.generation_request import GenerationRequest
from services.gateway.openai.sampling import with_seed
from services.gateway.openai.served_model import ServedModel
from services.gateway.replies.reply_format import Output, Usage
from services.gateway.replies.text_stream import TextPiece, TextStream
from services.gateway.routing.attempt import RelayRequest
from services.gateway.routing.progress import Progress


@dataclass(frozen=True, slots=True)
class Choice:
    """One output on its way: what the workers are asked, how far it is, and its text."""

    index: int  # among all outputs of the request
    request: RelayRequest
    progress: Progress
    text: TextStream


class Choices:
    """Owns the outputs of one request, by prompt; knows nothing of how they are answered."""

    def __init__(self, by_prompt: Sequence[Sequence[Choice]] = ()) -> None:
        self.by_prompt = by_prompt
        self.all = [choice for group in by_prompt for choice in group]

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many outputs it has; outputs that are not given count, too."""
        leaders = [group[0].progress for group in self.by_prompt]
        return Usage(
            prompt_tokens=sum(one.prompt_tokens for one in leaders),
            cached_tokens=sum(one.cached_tokens for one in leaders),
            completion_tokens=sum(choice.text.num_tokens for choice in self.all),
        )

    @property
    def ttft_s(self) -> float | None:
        """Until the first token of any output."""
        return min((one.progress.ttft_s for one in self.all if one.progress.ttft_s is not None), default=None)

    @property
    def gaps_s(self) -> list[float]:
        """TBT of all outputs."""
        return [gap for choice in self.all for gap in choice.progress.gaps_s]

    @property
    def num_retries(self) -> int:
        """Attempts after the first, of all outputs."""
        return sum(choice.progress.num_retries for choice in self.all)


def choices_of(
    intake: GenerationRequest, request_id: str, model: ServedModel, arrived_s: float, qos: QosClass = NO_PROMISES
) -> Choices:
    """The outputs that `intake` asks for. Each is a request of its own to the workers."""
    return Choices(
        [
            [
                _choice(intake, number * intake.best_of + offset, offset, request_id, model, arrived_s, qos)
                for offset in range(intake.best_of)
            ]
            for number in range(len(intake.prompts))
        ]
    )


def _choice(
    intake: GenerationRequest,
    index: int,
    offset: int,
    request_id: str,
    model: ServedModel,
    arrived_s: float,
    qos: QosClass,
) -> Choice:
    prompt = intake.prompts[index // intake.best_of]
    own_id = request_id if intake.num_outputs == 1 else f"{request_id}-{index}"
    progress = Progress(arrived_s)
    progress.prompt_tokens = len(prompt)
    text = TextStream(model.new_detokenizer(), intake.stops, intake.sampling.stop_token_ids, keep_stop=intake.keep_stop)
    sampling = with_seed(intake.sampling, offset)
    request = RelayRequest(own_id, prompt, sampling, intake.priority, qos, intake.tenant_salt)
    return Choice(index, request, progress, text)


def best_outputs(pieces: Sequence[TextPiece], num_choices: int, best_of: int) -> list[Output]:
    """Of each prompt's `best_of` whole outputs the `num_choices` with the highest mean logprob, best first."""
    if num_choices == best_of:
        return [Output(index, piece) for index, piece in enumerate(pieces)]
    kept: list[TextPiece] = []
    for start in range(0, len(pieces), best_of):
        kept += sorted(pieces[start : start + best_of], key=_mean_logprob, reverse=True)[:num_choices]
    return [Output(index, piece) for index, piece in enumerate(kept)]


def _mean_logprob(piece: TextPiece) -> float:
    return sum(token.logprob for token in piece.tokens) / max(len(piece.tokens), 1)
