"""Builds the parts of an engine with KV on the host from its configuration."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import NamedTuple

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.attention.attention_backend import AttentionBackend
from halfmoon.engine.config import OffloadConfig
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.models import Model
from halfmoon.engine.models.opt import OPTModel
from halfmoon.engine.offload.choice import Chooser
from halfmoon.engine.offload.link import Throttle, link_to
from halfmoon.engine.offload.profile import measure_costs
from halfmoon.engine.offload.runner import OffloadRunner
from halfmoon.engine.offload.staging import Staging
from halfmoon.engine.offload.tiers import KeysValues, TieredKV
from halfmoon.errors import Incompatible
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.policy.offload.host_choice import STAGING_BUFFERS, STAGING_SHARE
from halfmoon.policy.offload.recompute import OffloadCosts, Recompute

logger = logging.getLogger(__name__)

_ALWAYS_INPUTS = OffloadCosts(1.0, 0.0, Recompute(0.5, 0.0), Recompute(1.0, 1.0))  # computing costs nothing


class Rooms(NamedTuple):
    """Number of blocks in each memory, and in a staging buffer."""

    device: int
    host: int
    staging: int


class Offload:
    """Divides the device's budget and builds the parts around a runner. Create it before the model is packed."""

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        model: Model,
        model_config: ModelConfig,
        budget_blocks: int,
        most_tokens: int,
    ) -> None:
        """budget_blocks: blocks that fit into the device's KV memory. Raises Incompatible if they are too few."""
        self._config = config
        self._layout = layout
        self._keys_values = None if config.recompute == "never" else keys_values_of(model, model_config)
        has_inputs = self._keys_values is not None
        if config.recompute == "always" and not has_inputs:
            reason = _why_no_inputs(model, model_config)
            raise Incompatible(
                f"--offload-recompute always keeps layers' inputs instead of K and V, and {reason}: take auto or never",
                param="offload_recompute",
            )
        self.rooms = divide(config.host_bytes, layout, budget_blocks, most_tokens, has_inputs)

    def around(
        self, runner: ModelRunner, attention: AttentionBackend, arena: KVArena, throttle: Throttle
    ) -> tuple[OffloadRunner, TieredKV]:
        """Wraps a runner; arena: empty, with as many blocks as `rooms` says."""
        tensor = arena.tensor
        memory = TieredKV(arena, self.rooms.host, self._layout, self._keys_values)
        has_inputs = self._keys_values is not None
        staging = Staging(self._layout, self.rooms.staging, tensor.dtype, tensor.device, has_inputs)
        link = link_to(tensor.device, throttle)
        chooser = Chooser(self._layout.block_tokens, self._layout.num_layers)
        if self._config.recompute == "auto":
            costs = measure_costs(runner, memory, staging, link)
            logger.info("offload.measured", extra=asdict(costs))
            chooser.use(costs, learns=not tensor.is_cuda)
        elif self._config.recompute == "always":
            chooser.use(_ALWAYS_INPUTS, learns=False)
        return OffloadRunner(runner, attention, memory, staging, link, chooser, self._config), memory


def divide(host_bytes: int, layout: KVLayout, budget_blocks: int, most_tokens: int, has_inputs: bool) -> Rooms:
    """Takes the two staging buffers out of the device's budget. Raises Incompatible if it is too small."""
    planes = 3 if has_inputs else 2  # K, V and the inputs, each of these half as large as K and V
    staged_bytes = STAGING_BUFFERS * planes * layout.block_tokens * layout.token_layer_bytes // 2
    host = host_bytes // layout.block_bytes
    longest = layout.num_blocks(min(most_tokens, (budget_blocks + host) * layout.block_tokens))
    budget_bytes = budget_blocks * layout.block_bytes
    staging = max(longest, min(budget_blocks + host, budget_bytes // STAGING_SHARE // staged_bytes))
    device = (budget_bytes - staging * staged_bytes) // layout.block_bytes
    if device < 1 or host < 1:
        least = longest * staged_bytes + layout.block_bytes
        raise Incompatible(
            f"KV on the host needs {least} bytes of KV memory on the device, {budget_bytes} are given: one layer of "
            f"the longest sequence ({most_tokens} tokens: max_context_tokens) has to fit twice next to a block; and "
            f"at least a block on the host, {layout.block_bytes} bytes of {host_bytes}",
            param="offload",
        )
    return Rooms(device, host, staging)


def _why_no_inputs(model: Model, config: ModelConfig) -> str | None:
    """Why a layer's inputs are not kept instead of its K and V; None: they can be."""
    kv_size = 2 * config.num_kv_heads * config.head_dim
    if 2 * config.hidden_size != kv_size:
        return f"a layer's inputs have {config.hidden_size} numbers a token, K and V only {kv_size}"
    if not isinstance(model, OPTModel):
        return f"models of the family {config.family} do not make K and V from stored inputs"
    return None


def keys_values_of(model: Model, config: ModelConfig) -> KeysValues | None:
    """The model's function from a layer's inputs to K and V, if inputs are half as large; else the log says why not."""
    reason = _why_no_inputs(model, config)
    if reason is None:
        assert isinstance(model, OPTModel)
        model.keep_kv_projections()
        return model.keys_values
    logger.info("offload.inputs_not_kept", extra={"reason": f"{reason}: KV is loaded, or computed from tokens"})
    return None
