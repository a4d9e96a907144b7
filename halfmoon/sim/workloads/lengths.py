"""Lengths of prompts and answers: constants, and lognormal fits of published workloads."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.sim.workloads.workload import LONGEST_TOKENS, Ints


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths whose logarithm is normal with standard deviation `sigma`; sigma 0 is a constant."""

    mean_tokens: float
    sigma: float = 0.0

    def sample(self, num: int, rng: np.random.Generator, most_tokens: int) -> Ints:
        """Whole tokens, at least 1. Only drawn lengths are limited to `most_tokens`."""
        if self.sigma == 0:
            constant: Ints = np.full(num, max(round(self.mean_tokens), 1), dtype=np.int64)
            return constant
        drawn = rng.lognormal(math.log(self.mean_tokens) - self.sigma**2 / 2, self.sigma, num)
        result: Ints = np.clip(np.rint(drawn), 1, most_tokens).astype(np.int64)
        return result


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts and outputs, independent of each other."""

    prompt: Lognormal
    output: Lognormal
    source: str = ""


_MEANS = "means as in DistServe (arXiv 2401.09670), figure 7"
KNOWN_LENGTHS: MappingProxyType[str, Lengths] = MappingProxyType(
    {
        "chat": Lengths(
            Lognormal(755.5, 1.0),
            Lognormal(200.3, 0.83),
            f"ShareGPT; {_MEANS}; spread of LMSys-Chat-1M as in Vidur (arXiv 2405.05465), table 1: "
            "sigma = sqrt(2 ln(mean / median))",
        ),
        "code": Lengths(
            Lognormal(171.3, 0.5), Lognormal(98.2, 0.5), f"HumanEval; {_MEANS}; spread assumed: short, alike"
        ),
        "azure-code": Lengths(
            Lognormal(2047.8, 1.36),
            Lognormal(27.9, 0.85),
            "AzureLLMInferenceTrace_code (CC-BY-4.0): its means, and standard deviations of the logarithms",
        ),
        "summarization": Lengths(
            Lognormal(1738.3, 0.6), Lognormal(90.7, 0.6), f"LongBench; {_MEANS}; spread assumed: one document each"
        ),
    }
)
"""By the name of the use."""

_CONSTANT = re.compile(r"in=(\d{1,12}),out=(\d{1,12})")


def named_lengths(text: str) -> Lengths:
    """`chat`, `code`, …, or `in=512,out=64`. Raises InvalidRequest, which names the known workloads."""
    if text in KNOWN_LENGTHS:
        return KNOWN_LENGTHS[text]
    constant = _CONSTANT.fullmatch(text)
    if constant is None or not all(0 < int(group) <= LONGEST_TOKENS for group in constant.groups()):
        known = ", ".join(KNOWN_LENGTHS)
        raise InvalidRequest(f"{text!r} is not a workload: known are {known}, and in=512,out=64", param="workload")
    return Lengths(Lognormal(int(constant[1])), Lognormal(int(constant[2])), "constant")
