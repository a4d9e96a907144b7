"""One rank's computing, the same on every rank: its part of the model, its part of the KV memory, its links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.constraint import TokenMasks
from halfmoon.engine.device_path import DevicePath, choose_path, keeps_blocks, pack, weights_place
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.kv_memory.kv_budget import num_positions
from halfmoon.engine.kv_memory.kv_watch import LayerWatch
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.models import Model, build_model
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.models.linear import alike
from halfmoon.engine.models.model_part import ModelPart
from halfmoon.engine.models.weights import Progress
from halfmoon.engine.native.prepared_model import ModelSteps, ready_model
from halfmoon.engine.offload.build import Offload
from halfmoon.engine.offload.link import Throttle
from halfmoon.engine.offload.passes import Pass, PlannedSequence
from halfmoon.engine.offload.runner import OffloadRunner
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.engine.offload.weights import WeightStream, layers_on_host, weight_stream
from halfmoon.engine.parallel.grid import Grid
from halfmoon.engine.parallel.links import Links
from halfmoon.engine.parallel.weights import fill_dummy_part, load_part, load_part_shapes
from halfmoon.host_limits import num_threads
from halfmoon.kv.kv_layout import KVLayout, Shard


class StepRank(Protocol):
    """What computes one rank's part of each step; the tensors of a step are its own affair."""

    @property
    def memory(self) -> KVArena | TieredKV:
        """Its KV memory."""

    @property
    def offload(self) -> OffloadRunner | None:
        """Runs steps with KV on the host; None: there is none."""

    @property
    def weights(self) -> WeightStream | None:
        """Brings the weights of layers that are on the host; None: all are on the device."""

    @property
    def runner(self) -> ModelRunner:
        """Its part of the model; on rank 0 it samples."""

    def batch(self, chunks: Sequence[Chunk]) -> Any:
        """The tensors of a step over `chunks`, for `compute`; involves no other rank."""

    def compute(self, batch: Any, watch: LayerWatch | None = None) -> Tensor | None:
        """See `Rank.compute`."""

    def abort(self) -> None:
        """Makes a waiting `compute` fail because another rank is gone. Any thread."""


class Rank:
    """Owns one rank's part of the model and of the KV memory. Knows nothing of processes or of other ranks' state."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        grid: Grid,
        rank: int,
        links: Links,
        on_progress: Progress | None = None,
    ) -> None:
        """Loads the weights. `config` has device, dtype and num_blocks resolved. Raises Incompatible."""
        assert config.dtype != "auto"
        assert config.num_blocks is not None
        context_tokens = min(checkpoint.context_tokens, config.max_context_tokens or checkpoint.context_tokens)
        positions = num_positions(config, context_tokens, config.num_blocks * grid.sequence_size)
        whole = replace(checkpoint.model_config, context_tokens=positions)
        shard = grid.shard(whole, rank)
        self._is_first_rank, self._is_sender = rank == 0, grid.tensor_rank(rank) == 0
        self.links = links
        self.block_tokens = config.block_tokens
        self._whole = whole
        self._device = config.device
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        reduce = links.all_reduce if grid.tensor_size > 1 else None
        host_layers = layers_on_host(shard.layer_end - shard.layer_start, config.host_weights)
        self._part = ModelPart(whole, shard, grid.tensor_rank(rank), grid.tensor_size, reduce, host_layers)
        path = choose_path(config, self._part.config, self._dtype, context_tokens)
        throttle = Throttle(config.link_bytes_per_s)
        self.weights = weight_stream(host_layers, torch.device(self._device), throttle, path.packing)
        model = self._model(checkpoint, config, path, on_progress)
        self._hidden_dtype = model.hidden_dtype
        if self.weights is not None:
            self.weights.begin()
        path.use_threads(torch.get_num_threads())
        kv_dtype = config.layout_dtype(config.dtype)
        whole_layout = KVLayout(whole.num_layers, whole.num_kv_heads, whole.head_dim, kv_dtype, config.block_tokens)
        layout = shard_layout(whole_layout, shard)
        offload, num_blocks = None, config.num_blocks
        if config.offload is not None:
            # every rank plans the same passes by the chunks alone, so nothing is recomputed by rates of one of them
            loading = replace(
                config.offload, recompute="never", host_bytes=config.offload.host_bytes // grid.tensor_size
            )
            offload = Offload(loading, layout, model, self._part.config, num_blocks, context_tokens)
            num_blocks = offload.rooms.device
        self.arena = KVArena(layout, num_blocks, self._device, path.kernels)  # on the device
        masks = TokenMasks(checkpoint.path, whole.vocab_size, checkpoint.eos_token_ids)
        self.runner = ModelRunner(
            model, self.arena, path.attention, checkpoint.eos_token_ids, masks=masks, sampler=path.sampler
        )
        self.memory: KVArena | TieredKV = self.arena
        self.offload: OffloadRunner | None = None
        if offload is not None:
            self.offload, self.memory = offload.around(self.runner, path.attention, self.arena, throttle)

    def _model(
        self, checkpoint: Checkpoint, config: EngineConfig, path: DevicePath, on_progress: Progress | None
    ) -> Model:
        part, blocks, are_kept = self._part, checkpoint.block_file, keeps_blocks(checkpoint, path)

        def load(model: Model) -> None:
            if config.weights == "dummy":
                fill_dummy_part(model, part)
            else:
                load_part(model, part, checkpoint.weight_files, on_progress, blocks, as_numbers=not are_kept)

        pack_layer = alike if self.weights is None else self.weights.pack_layer
        steps = ModelSteps(
            build=partial(build_model, self._whole, self._dtype, self._device, path.layer_ops, part),
            load=load,
            load_shapes=lambda model: load_part_shapes(model, part, blocks if are_kept else None),
            pack=lambda model, wrap: pack(model, path, checkpoint.quantization, wrap, pack_layer),
        )
        return ready_model(steps, weights_place(config, checkpoint, path, self._dtype, part))

    @torch.inference_mode()
    def batch(self, chunks: Sequence[Chunk]) -> ForwardBatch | list[Pass]:
        """What `compute` needs of a step over `chunks`: passes, if some of its KV is on the host.

        Involves no other rank.
        """
        passes = [] if self.offload is None else self.offload.passes([PlannedSequence(chunk) for chunk in chunks])
        return passes or self.runner.batch(chunks)

    @torch.inference_mode()
    def compute(self, batch: ForwardBatch | list[Pass], watch: LayerWatch | None = None) -> Tensor | None:
        """Computes this rank's part of a step. Rank 0 gets the logits [num_logits, vocab_size], if the batch wants any.

        `watch` is notified of this rank's own layers while they compute. A step without logits ends, on each stage,
        when its hidden states are on their way: the next step's chunk starts here while later stages compute this one.
        Raises PeerGone.
        """
        if isinstance(batch, list):
            return self._compute_passes(batch, watch)
        num_tokens, num_logits = batch.token_ids.shape[0], batch.logit_rows.shape[0]
        hidden = None
        if not self._part.is_first:
            hidden = self.links.receive_hidden(self._empty(num_tokens, self._whole.hidden_size, self._hidden_dtype))
        out = self.runner.forward(batch, hidden, watch)
        self.runner.finish()  # as in `ModelRunner.run`: KV is copied on other streams
        if not self._part.is_last:
            self.links.send_hidden(out)
            if self._is_first_rank and num_logits:
                return self.links.receive_logits(self.empty_logits(num_logits))
            return None
        return self._gathered(out) if num_logits else None

    def _compute_passes(self, passes: list[Pass], watch: LayerWatch | None) -> Tensor | None:
        """With KV on the host there is one stage."""
        assert self.offload is not None
        out = self.offload.logits(passes, watch)
        self.offload.finish_step()
        return self._gathered(out) if len(out) else None

    def _gathered(self, out: Tensor) -> Tensor | None:
        """All logits from the last stage's parts, on the first rank; None on others."""
        logits = self.links.gather_logits(out, self._whole.vocab_size)
        if self._part.is_first:
            return logits
        if self._is_sender:
            self.links.send_logits(logits)
        return None

    def empty_logits(self, num_rows: int) -> Tensor:
        """Room for logits of the whole vocabulary, [num_rows, vocab_size]."""
        return self._empty(num_rows, self._whole.vocab_size, torch.float32)

    def abort(self) -> None:
        """Makes a waiting `compute` fail because another rank is gone. Any thread."""
        self.links.abort()

    def _empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=self._device)


def config_here(config: EngineConfig, rank_here: int, num_ranks_here: int) -> EngineConfig:
    """The configuration of one of a host's ranks, with its device and threads.

    `cuda` means one device per rank (not run yet: there was no host with two). A CPU's cores are divided among the
    ranks of its host: more threads than cores would wait for each other.
    """
    if config.device == "cuda":
        # a cluster engine may show each process its own device only
        return replace(config, device=f"cuda:{rank_here % max(torch.cuda.device_count(), 1)}")
    threads = max(num_threads() // num_ranks_here, 1) if config.device == "cpu" else None
    return replace(config, num_threads=config.num_threads or threads)


def shard_layout(whole: KVLayout, shard: Shard) -> KVLayout:
    """The layout of one rank's KV memory."""
    num_layers, num_heads = shard.layer_end - shard.layer_start, shard.head_end - shard.head_start
    return replace(whole, num_layers=num_layers, num_kv_heads=num_heads)
