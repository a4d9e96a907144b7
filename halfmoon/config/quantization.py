"""How a model's weights are held in memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from halfmoon.config.section import Section


class QuantizationConfig(Section):
    """One setting of the model: rounded weights are another model, so gateways and workers must have the same."""

    quantization: Literal["auto", "none", "int8", "int4"] = Field(
        "auto",
        description="weights in memory, for our own engine on a CPU: auto: a GGUF file's stay in its blocks; none: all "
        "have the dtype; int8, int4: rounded in groups of 32, the head to int8",
    )
