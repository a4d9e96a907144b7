"""Rank 0: runs schedules over all ranks. To the engine it is a runner and a KV memory like those of one device.

Chunked pipeline parallelism (Mooncake, section 5.1) needs only that a step ends here as soon as its logits are not
awaited: `run` then returns while later stages compute, and the next chunk of the prompt starts here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.chunk import chunk_of
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.kv_memory.kv_budget import blocks_in, kv_budget_bytes
from halfmoon.engine.kv_memory.kv_watch import LayerWatch
from halfmoon.engine.models.weights import Progress
from halfmoon.engine.offload.weights import WeightStream
from halfmoon.engine.parallel.followers import Followers, OnFailure
from halfmoon.engine.parallel.grid import Grid
from halfmoon.engine.parallel.joined_ranks import awaited_ranks, hosts_of
from halfmoon.engine.parallel.links import LOOPBACK, Links, PeerGone, Store, serve_rendezvous
from halfmoon.engine.parallel.messages import CopyKV, Setup, Step, WriteKV
from halfmoon.engine.parallel.rank import StepRank, config_here, shard_layout
from halfmoon.engine.parallel.sequence_rank import load_rank
from halfmoon.engine.parallel.sharded_kv import ShardedKV
from halfmoon.engine.parallel.spread_kv import SpreadKV
from halfmoon.engine.request import SampledToken
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.schedule import ScheduledSequence
from halfmoon.engine.scheduling.spread_pool import Blocks, SpreadPool
from halfmoon.engine.step_result import StagedWork
from halfmoon.errors import Incompatible, ServiceFailed
from halfmoon.kv.device_bytes import DeviceBytes, KVPlace, KVSource
from halfmoon.kv.kv_layout import KVLayout, KVSlice, Shard
from halfmoon.kv.staged_shards import RankShard, StagedShards, Ticket, WorkerRanks


class ParallelRunner:
    """Owns rank 0's part and the followers; `config` has its dtype resolved.

    A step that fails between ranks ends all of them: ServiceFailed.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, layout: KVLayout, on_progress: Progress | None = None
    ) -> None:
        """Starts the followers and loads the weights, all ranks at once. Raises Incompatible, ServiceFailed."""
        given, model_config = config, checkpoint.model_config
        grid = Grid(config.tensor_parallel, config.pipeline_parallel, config.sequence_parallel)
        grid.check(model_config)
        self._grid = grid
        shards = [grid.shard(model_config, rank) for rank in grid.ranks]
        num_rank_blocks = _num_rank_blocks(config, model_config, shards, layout)
        config = replace(config, num_blocks=num_rank_blocks, joined=None)
        self._num_steps = 0  # steps that `run` has finished; later stages may still compute the last of them
        self.num_spread_tokens = 0  # of the last step; see `StepResult`
        self.pool: Blocks
        self._kv: ShardedKV | SpreadKV
        self.ranks: WorkerRanks | None = None  # those that can pass KV on themselves; None: rank 0 alone does
        joined = [] if given.joined is None else awaited_ranks(given.joined)
        if grid.sequence_size > 1:
            self.num_blocks = num_rank_blocks * grid.sequence_size
            long_blocks = config.long_prompt_tokens // layout.block_tokens
            self.pool = SpreadPool(grid.sequence_size, num_rank_blocks, long_blocks)
            self._kv = SpreadKV(layout, grid.sequence_size, self._copy_all, lambda: self._num_steps)
        else:
            self.num_blocks = num_rank_blocks
            self.pool = BlockPool(num_rank_blocks)
            readable = tuple(grid.is_first_holder(model_config, rank) for rank in grid.ranks)
            addresses = [None] * (grid.size - len(joined)) + [rank.kv_address for rank in joined]
            held = map(RankShard, grid.ranks, shards, addresses)
            self.ranks = WorkerRanks(tuple(held), readable, layout.dtype, StagedShards())
            self._kv = ShardedKV(layout, self.ranks, self._copy_all, lambda: self._num_steps)
        address = joined[0].address_here if joined else LOOPBACK
        store, port = serve_rendezvous(address)
        places = [(rank, given.num_ranks_here) for rank in range(given.num_ranks_here)] + hosts_of(joined)
        setups = [
            Setup(
                rank,
                *places[rank],
                str(checkpoint.path.resolve()),
                checkpoint.fingerprint,
                checkpoint.quantization,
                config,
                (address, port),
            )
            for rank in grid.ranks
            if rank > 0
        ]
        self._followers = Followers(setups, joined)
        try:
            self._followers.connect()
            self._rank = _rank_0(checkpoint, config_here(config, *places[0]), grid, store, address, on_progress)
            if config.offload is not None:
                self.num_blocks = self._rank.memory.num_blocks
                self.pool = BlockPool(self.num_blocks)
            self._followers.wait_until_ready()
            self._followers.call_on_failure(self._rank.abort)
        except BaseException:
            self._followers.close()
            raise

    @torch.inference_mode()
    def run(self, scheduled: tuple[ScheduledSequence, ...], watch: LayerWatch | None = None) -> list[SampledToken]:
        """Runs like `ModelRunner.run`. Raises ServiceFailed when a rank is gone, and cannot be used after that.

        `watch` is notified of the first stage's layers: what later stages have written is known when the step is over,
        and `read` waits for it.
        """
        chunks = tuple(chunk_of(item) for item in scheduled)
        batch = self._rank.batch(chunks)
        if self._grid.sequence_size > 1:
            self.num_spread_tokens = batch.num_spread_tokens
        self._followers.broadcast(Step(chunks))
        try:
            logits = self._rank.compute(batch, watch and self._lagging(watch))
        except PeerGone:
            raise self._followers.cause() from None
        except Exception as error:  # the followers wait for data that will not come
            self._followers.fail(ServiceFailed(f"rank 0 failed in a step: {type(error).__name__}: {error}"))
            raise self._followers.cause() from error
        self._num_steps += 1
        return [] if logits is None else self._rank.runner.sample(scheduled, logits)

    def read(self, blocks: Sequence[int], part: KVSlice, out: KVPlace | None = None) -> memoryview:
        """See `KVArena.read`. Into the ranks' own memory for a ticket; raises Incompatible for that of one device."""
        if isinstance(out, DeviceBytes):
            kv, ticket = self._by_ticket(out)
            kv.stage(blocks, part, ticket)
            return memoryview(b"")
        return self._kv.read(blocks, part, out)

    def write(self, blocks: Sequence[int], part: KVSlice, payload: KVSource) -> None:
        """See `KVArena.write`. From the ranks' own memory for a ticket; raises Incompatible for that of one device."""
        if isinstance(payload, DeviceBytes):
            kv, ticket = self._by_ticket(payload)
            kv.write_staged(blocks, part, ticket)
            return
        self._kv.write(blocks, part, payload)

    def check(self) -> None:
        """Raises ServiceFailed, with the reason, when a follower is gone."""
        self._followers.check()

    def call_on_failure(self, on_failure: OnFailure) -> None:
        """Calls `on_failure`, on any thread, when a follower ends on its own."""
        self._followers.call_on_failure(on_failure)

    def take_work(self) -> StagedWork:
        """See `OffloadRunner.take_work`: rank 0's."""
        return StagedWork() if self._rank.offload is None else self._rank.offload.take_work()

    @property
    def weights(self) -> WeightStream | None:
        """Rank 0's weights on the host."""
        return self._rank.weights

    def close(self) -> None:
        """Ends the followers. Idempotent; nothing else may be called afterwards."""
        self._followers.close()
        if self._rank.offload is not None:
            self._rank.offload.close()

    def _by_ticket(self, place: DeviceBytes) -> tuple[ShardedKV, Ticket]:
        if not isinstance(place.cells, Ticket) or isinstance(self._kv, SpreadKV):
            raise Incompatible("KV of several ranks is not in one device's memory")
        return self._kv, place.cells

    def _lagging(self, watch: LayerWatch) -> LayerWatch:
        """Limits `watch` to the layers that every tensor rank has written.

        When rank 0 stores a layer, it holds the sum of the layer before, to which each rank adds after storing its own.
        """
        if self._grid.tensor_size == 1:
            return watch

        def notify(num_layers: int) -> None:
            if num_layers > 1:
                watch.notify(num_layers - 1)

        return LayerWatch(watch.every, notify)

    def _copy_all(self, requests: Mapping[int, tuple[CopyKV, bytes | memoryview]]) -> Mapping[int, bytes | memoryview]:
        """Copies rank 0's own part while the followers copy theirs."""
        done: dict[int, bytes | memoryview] = {}
        if 0 in requests:
            request, payload = requests[0]
            if isinstance(request, WriteKV):
                self._rank.memory.write(request.blocks, request.part, payload)
            else:
                done[0] = self._rank.memory.read(request.blocks, request.part)
        done |= self._followers.ask({rank: request for rank, request in requests.items() if rank > 0})
        return done


def _rank_0(
    checkpoint: Checkpoint, config: EngineConfig, grid: Grid, store: Store, address: str, on_progress: Progress | None
) -> StepRank:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    return load_rank(checkpoint, config, grid, 0, Links(store, grid, 0, config.device, address), on_progress)


def _num_rank_blocks(config: EngineConfig, model: ModelConfig, shards: Sequence[Shard], layout: KVLayout) -> int:
    """Number of blocks that the rank with the largest shard can hold. Raises Incompatible if it has no room for one."""
    if config.num_blocks is not None:
        return -(-config.num_blocks // config.sequence_parallel)
    budget = kv_budget_bytes(config, model, getattr(torch, config.dtype))
    return min(blocks_in(budget, shard_layout(layout, shard)) for shard in shards)
