"""Which code attends, as a table by back end, by what a model's attention needs, and by what a step holds.

The engine chooses by it; `python -m benchmarks.kernels --table` prints it. Torch-free.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from halfmoon.architectures.model_config import ModelConfig

Backend = Literal["sdpa", "native", "triton", "flex"]
# What tokens attend to: everything before them, latents, less than everything (a window), or everything by capped
# scores.
Need = Literal["full", "latents", "windows", "caps"]


class Attends(NamedTuple):
    """What attends in a step of decodes alone, of prompts alone, and of both."""

    decodes: str
    prompts: str
    both: str

    @property
    def is_own(self) -> bool:
        """Whether the back end attends, rather than torch with gathered keys."""
        return self.decodes != "gathered"


_GATHERED = Attends("gathered", "gathered", "gathered")
_FLEX = Attends("flex", "flex", "flex twice")
TABLE: dict[tuple[Backend, Need], Attends] = {
    ("native", "full"): Attends("native", "native", "native"),
    ("triton", "full"): Attends("decode_attention", "prefill_attention", "decode_attention, prefill_attention"),
    ("triton", "latents"): Attends("latent_attention", "latent_attention", "latent_attention twice"),
    ("flex", "full"): _FLEX,
    ("flex", "windows"): _FLEX,
    ("flex", "caps"): _FLEX,
    ("sdpa", "full"): Attends("flash", "flash", "flash"),
    ("sdpa", "windows"): Attends("flash", "flash, gathered behind the window", "flash, gathered behind the window"),
}
"""Others are computed by torch with gathered keys (`attend_reference`)."""


def attends(backend: Backend, need: Need) -> Attends:
    """The row of the table. A worker's `sdpa` is on a CPU; on other devices it gathers."""
    return TABLE.get((backend, need), _GATHERED)


def need_of(model: ModelConfig, context_tokens: int) -> Need:
    """What the attention of a model needs, whose sequences have at most `context_tokens`."""
    if model.latent is not None:
        return "latents"
    if any(window is not None and window < context_tokens for window in model.windows):
        return "windows"
    return "full" if model.attention_softcap is None else "caps"
