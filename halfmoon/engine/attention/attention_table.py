"""Which code attends, as a table by back end, by what a model's attention needs, and by what a step holds.

The engine chooses by it; `python -m benchmarks.engine.kernels --table` prints it. Torch-free.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from halfmoon.architectures.model_config import ModelConfig

Backend = Literal["sdpa", "native", "triton", "flex"]
# What tokens attend to: everything before them, latents, less than everything (a window), or everything by capped
# scores.
Need = Literal["full", "latents", "windows", "caps"]
# Decodes and prompts of one step by one kernel (`mixed_attention`), by two, or as FUSED_FROM says.
MixedAttention = Literal["auto", "fused", "apart"]


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
    ("triton", "full"): Attends(
        "decode_attention", "prefill_attention", "decode_attention, prefill_attention; or mixed_attention"
    ),
    ("triton", "latents"): Attends("latent_attention", "latent_attention", "latent_attention twice"),
    ("flex", "full"): _FLEX,
    ("flex", "windows"): _FLEX,
    ("flex", "caps"): _FLEX,
    ("sdpa", "full"): Attends("flash", "flash", "flash"),
    ("sdpa", "windows"): Attends("flash", "flash, gathered behind the window", "flash, gathered behind the window"),
}
"""Others are computed by torch with gathered keys (`attend_reference`)."""

FUSED_FROM: dict[tuple[int, int], int] = {}
"""Where `mixed_attention` is faster than two kernels: tokens of a step's decodes, by a GPU's compute capability.

Empty: on the one that was measured (9.0) neither is faster throughout. `python -m benchmarks.engine.kernels --only
mixed` measures.
"""


def attends(backend: Backend, need: Need) -> Attends:
    """The row of the table. A worker's `sdpa` is on a CPU; on other devices it gathers."""
    return TABLE.get((backend, need), _GATHERED)


def fused_from(setting: MixedAttention, capability: tuple[int, int] | None) -> int | None:
    """Fewest tokens, in all contexts of a step's decodes, for which these and prompts are one kernel; None: never.

    capability: of the GPU; None: none.
    """
    if setting == "auto":
        return None if capability is None else FUSED_FROM.get(capability)
    return 0 if setting == "fused" else None


def need_of(model: ModelConfig, context_tokens: int) -> Need:
    """What the attention of a model needs, whose sequences have at most `context_tokens`."""
    if model.latent is not None:
        return "latents"
    if any(window is not None and window < context_tokens for window in model.windows):
        return "windows"
    return "full" if model.attention_softcap is None else "caps"
