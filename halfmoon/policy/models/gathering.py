"""How long decodes wait between steps for answers that are on their way, where both need the same cores. Pure.

A step reads all weights for however few answers. While several prompts are computed beside it on the same cores, each
step left out ends them sooner, and they join a step that is paid for once. Measured in docs/log/engine.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

_MARGIN = 0.5  # share of a TBT target that a step and its pause may take: beside a prompt the next step may be slower
_MOST_TIMES = 4.0  # as long as a step: a fifth of the time remains for decodes
_MOST_S = 0.15  # where nobody set a target


def gathering_pause_s(step_s: float, batch: int, num_coming: int, tbt_targets_s: Iterable[float | None]) -> float:
    """The pause after a decode step that took `step_s`, with `batch` answers running and `num_coming` on their way.

    None for a single one that comes, and the shorter the fewer come for each that runs. The tightest target bounds it;
    None and inf: nobody set one.
    """
    if num_coming < 2:
        return 0.0
    target_s = min((each_s for each_s in tbt_targets_s if each_s is not None), default=math.inf)
    most_s = _MOST_S if target_s == math.inf else min(_MARGIN * target_s - step_s, _MOST_S)
    return max(min(_MOST_TIMES * min((num_coming - 1) / max(batch, 1), 1.0) * step_s, most_s), 0.0)
