"""Draws tokens by our own sampler inside vLLM, for requests whose parameters vLLM has no words for.

vLLM imports it by name, as a logits processor: all logits but the drawn token's become minus infinity.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from halfmoon.engine.checkpoint.converted import default_cache_dir
from halfmoon.engine.constraint import TokenMasks
from halfmoon.engine.native.compiler import compiled
from halfmoon.engine.native.library import NativeLibrary
from halfmoon.engine.native.sampling import native_sampler
from halfmoon.engine.request import CONSTRAINT_TOKEN_ID
from halfmoon.engine.sampler import TORCH_SAMPLER, SamplerOps, SamplingRow, sample
from halfmoon.errors import Incompatible
from halfmoon.vllm_engine.messages import NotDrawn, OwnDraw
from halfmoon.vllm_engine.reports import ReportSender

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)


class OwnSampling(AdapterLogitsProcessor):
    """Owns the automata of constrained outputs in this process."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        model, extra = vllm_config.model_config, vllm_config.kv_transfer_config.kv_connector_extra_config
        self._eos_token_ids = frozenset(extra["eos_token_ids"])
        self._masks = TokenMasks(Path(model.model), model.get_vocab_size(), self._eos_token_ids)
        self._reports = ReportSender(extra["reports"])
        self._ops = _sampler() if device.type == "cpu" else TORCH_SAMPLER

    def is_argmax_invariant(self) -> bool:
        """False: it decides."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """See the base class; None for a request that vLLM's sampler serves."""
        draw = OwnDraw.of((params.extra_args or {}).get(OwnDraw.NAME))
        if draw is None:
            return None
        return partial(_choose, self, draw, draw.sampling.forbidden())

    def choose(
        self, draw: OwnDraw, forbidden: NDArray[np.bool_], prompt: list[int], output: list[int], logits: Tensor
    ) -> Tensor:
        """Leaves one token. If none can be drawn, any is left, and the worker is told before it comes."""
        row = SamplingRow(draw.sampling, [*prompt, *output], len(prompt) - draw.num_before, forbidden)
        (drawn,) = sample(logits.unsqueeze(0), [row], self._eos_token_ids, self._masks, self._ops)
        if drawn.token_id < 0:
            self._reports.send(NotDrawn(draw.request_id, drawn.token_id == CONSTRAINT_TOKEN_ID))
        chosen = torch.full_like(logits, float("-inf"))
        chosen[max(drawn.token_id, 0)] = 0.0
        return chosen


def _sampler() -> SamplerOps:
    """The compiled kernels, on the calling thread alone: others would compete with vLLM's for the cores."""
    try:
        return native_sampler(NativeLibrary(compiled(default_cache_dir()), torch.float32, 1))
    except Incompatible as error:
        log.warning("sampler.by_torch", extra={"reason": error.message})
        return TORCH_SAMPLER


def _choose(
    processor: OwnSampling,
    draw: OwnDraw,
    forbidden: NDArray[np.bool_],
    prompt_ids: list[int],
    output_ids: list[int],
    logits: Tensor,
) -> Tensor:
    """The per-request form that vLLM calls: it tells by the number of parameters that the prompt is wanted."""
    return processor.choose(draw, forbidden, prompt_ids, output_ids, logits)
