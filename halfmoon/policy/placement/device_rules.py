"""Which prompts workers of a kind of device compute, where workers of unequal speed serve one cluster. Pure.

Without a rule the predicted TTFT alone decides, to which every worker's own speed and queue belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.policy.values import PlacementRequest
from halfmoon.policy.view.capabilities import RoleMasks
from halfmoon.policy.view.cluster_view import ClusterView

_PARAM = "prefill_devices"
_FORM = "DEVICE [tokens<=NUMBER] [classes=NAME,NAME], such as 'cpu tokens<=512 classes=batch'"


@dataclass(frozen=True, slots=True)
class DeviceRule:
    """Workers of a device compute only prompts that satisfy all of it, as long as other workers can serve the rest."""

    device: str  # what the worker's device begins with, in any case: cpu, cuda
    most_tokens: int | None = None  # of a prompt
    classes: tuple[str, ...] | None = None  # of requests

    def allows(self, request: PlacementRequest) -> bool:
        """Whether such workers may compute the prompt."""
        is_short = self.most_tokens is None or request.num_prompt_tokens <= self.most_tokens
        return is_short and (self.classes is None or request.qos_class in self.classes)

    @classmethod
    def parse(cls, text: str) -> DeviceRule:
        """Reads `DEVICE [tokens<=NUMBER] [classes=NAME,NAME]`. Raises InvalidRequest."""
        device, *parts = text.split() or [""]
        most_tokens, classes = None, None
        for part in parts:
            if part.startswith("tokens<=") and part.removeprefix("tokens<=").isdecimal():
                most_tokens = int(part.removeprefix("tokens<="))
            elif part.startswith("classes=") and all(names := part.removeprefix("classes=").split(",")):
                classes = tuple(names)
            else:
                raise InvalidRequest(f"{part!r} is no part of a rule: write {_FORM}", param=_PARAM)
        if most_tokens is None and classes is None:
            raise InvalidRequest(f"the rule {text!r} says nothing of prompts: write {_FORM}", param=_PARAM)
        return cls(device, most_tokens, classes)


def allowed_rows(
    rules: Sequence[DeviceRule], view: ClusterView, request: PlacementRequest, rows: RoleMasks
) -> RoleMasks:
    """The rows without workers whose rule forbids this prompt; all of them if no other could compute it."""
    closed = [rule.device for rule in rules if not rule.allows(request)]
    if not closed:
        return rows
    is_open = np.logical_not(np.logical_or.reduce([view.on_device(device) for device in closed]))
    left = rows._replace(prefill=rows.prefill & is_open, both=rows.both & is_open)
    return left if np.logical_or.reduce(left.prefill | left.both) else rows
