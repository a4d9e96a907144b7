"""Measures what computing takes on this machine, before the first request."""

from __future__ import annotations

from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.step_result import StepResult

_SHARES = (1 / 8, 1 / 8, 1 / 4, 1 / 2)  # of a whole step's tokens; the first one warms everything up and does not count
_SALT = b"halfmoon first steps"  # keeps these prompts out of other requests' prefix matches


def warm_up_steps(engine: Engine) -> list[StepResult]:
    """The results of a few prefill steps over made-up prompts, computed in turn. Nothing of them remains."""
    most = min(engine.config.step_tokens, engine.context_tokens - 1)
    results = []
    for number, share in enumerate(_SHARES):
        length = max(1, int(most * share))
        prompt = tuple((31 * number + 7 * token) % 97 for token in range(length))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = EngineRequest(f"first-{number}", prompt, sampling, prefill_only=True, tenant_salt=_SALT)
        engine.add(request)
        results.append(engine.step())
        engine.cancel(request.request_id)
    return results[1:]
