"""One measured engine step, and what it says of prompts and of decode steps."""

from __future__ import annotations

from typing import NamedTuple

from halfmoon.policy.models.latency import PrefillModel, PrefillSample, StepModel, StepSample, prefill_sample


class MeasuredStep(NamedTuple):
    """What a step computed, and how long it took."""

    batch: int  # decoding sequences
    context_tokens: int  # of all of them together
    seconds: float
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0  # pairs of such a token and a token that it attends to
    drafts: int = 0  # guessed tokens that ran behind those of the decoding sequences
    right_drafts: int = 0  # of these, how many were what was drawn

    @property
    def num_decode_rows(self) -> int:
        """Tokens of decoding sequences, guesses included."""
        return self.batch + self.drafts

    @property
    def decode_sample(self) -> StepSample:
        """A step without prompts as a sample: a guess is a row like a sequence's newest token."""
        return StepSample(self.num_decode_rows, self.context_tokens, self.seconds)

    def prompt_sample(self, model: StepModel) -> PrefillSample:
        """The step's matrix products and its prompts' attention: all of it but the attention of its decodes.

        So a mixed step teaches how long prompts take as `LatencyModel.stage_s` says: decodes are rows of the same
        matrix products, with attention of their own.
        """
        attention_s = model.f * self.context_tokens
        num_rows = self.prefill_tokens + self.num_decode_rows
        return prefill_sample(num_rows, self.prefill_pairs, self.seconds - attention_s)

    def tells_of_prompts(self, prefill: PrefillModel, model: StepModel) -> bool:
        """Whether the step should take longer than its decodes alone, so that it says what its prompts take.

        The end of a moved answer's text, a few tokens, costs less than the decodes' time varies.
        """
        if not self.batch or not any(prefill):
            return True
        new_tokens, cached_tokens, _ = self.prompt_sample(model)
        return prefill.seconds(new_tokens, cached_tokens) >= model.seconds(self.num_decode_rows, self.context_tokens)
