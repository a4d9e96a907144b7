"""What was written is read again, wherever it lies and whatever a block on the host holds; two halves are room."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.kv.device_bytes import DeviceBytes
from halfmoon.kv.kv_layout import KVLayout, KVSlice

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=3, dtype="float32", block_tokens=4)
NUM_DEVICE, NUM_HOST = 3, 6
WEIGHT = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(1))  # [layers, K and V, hidden_size]


def keys_values(layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (x @ WEIGHT[layer].T).view(len(x), 2, 2, 3).unbind(1)
    return k, v


def make() -> TieredKV:
    return TieredKV(KVArena(LAYOUT, NUM_DEVICE, "cpu"), NUM_HOST, LAYOUT, keys_values)


def values(seed: int, num_tokens: int) -> np.ndarray:
    shape = LAYOUT.shape(LAYOUT.num_layers, num_tokens)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def read(memory: TieredKV, blocks: list[int], start: int, num_tokens: int) -> np.ndarray:
    found = memory.read(blocks, KVSlice(0, LAYOUT.num_layers, start, num_tokens))
    return np.frombuffer(found, np.float32).reshape(LAYOUT.shape(LAYOUT.num_layers, num_tokens))


@given(st.permutations(range(NUM_DEVICE + NUM_HOST)), st.data())
def test_what_was_written_is_read(order: list[int], data: st.DataObject) -> None:
    memory = make()
    memory.pool.allocate(NUM_DEVICE + NUM_HOST)
    written = values(0, 4 * len(order))
    first = data.draw(st.integers(1, written.shape[3] - 1))
    for start, end in ((0, first), (first, written.shape[3])):
        part = np.ascontiguousarray(written[:, :, :, start:end])
        memory.write(order, KVSlice(0, LAYOUT.num_layers, start, end - start), part.data.cast("B"))
    start = data.draw(st.integers(0, written.shape[3] - 1))
    num_tokens = data.draw(st.integers(1, written.shape[3] - start))
    np.testing.assert_array_equal(read(memory, order, start, num_tokens), written[:, :, :, start : start + num_tokens])
    runs = list(memory.runs(order, start, num_tokens))
    assert [run.start for run in runs] == list(np.cumsum([0, *(run.num_tokens for run in runs)])[:-1])
    assert sum(run.num_tokens for run in runs) == num_tokens


@given(st.lists(st.sampled_from(range(NUM_DEVICE, NUM_DEVICE + NUM_HOST)), unique=True), st.data())
def test_kv_is_replaced_by_inputs_and_back(blocks: list[int], data: st.DataObject) -> None:
    memory = make()
    order = memory.pool.allocate(NUM_DEVICE + NUM_HOST)
    expected = values(1, 4 * len(order))
    memory.write(order, KVSlice(0, LAYOUT.num_layers, 0, expected.shape[3]), expected.data.cast("B"))
    for block in blocks:
        inputs = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(block))
        memory.replace_by_inputs(block, inputs)
        k, v = zip(*(keys_values(layer, x) for layer, x in enumerate(inputs)), strict=True)
        kv = torch.stack((torch.stack(k), torch.stack(v)), 1).transpose(2, 3)  # [layers, 2, kv_heads, tokens, head_dim]
        where = order.index(block) * 4
        expected[:, :, :, where : where + 4] = kv.numpy()
        if data.draw(st.booleans()):
            memory.replace_by_kv(block, kv)
            assert not memory.holds_inputs(block)
    np.testing.assert_allclose(read(memory, order, 0, expected.shape[3]), expected, rtol=1e-5, atol=1e-5)
    memory.pool.check_integrity()


def test_two_blocks_of_inputs_make_room_for_one_more() -> None:
    memory = make()
    order = memory.pool.allocate(NUM_DEVICE + NUM_HOST)
    for block in order[NUM_DEVICE : NUM_DEVICE + 5]:
        assert not memory.holds_inputs(block)
        memory.begin_inputs(block)
        assert memory.holds_inputs(block)
    assert memory.pool.num_free == 2
    more = memory.pool.allocate(2)
    memory.replace_by_kv(order[NUM_DEVICE], torch.zeros(2, 2, 2, 4, 3))  # the odd half
    memory.replace_by_kv(order[NUM_DEVICE + 1], torch.zeros(2, 2, 2, 4, 3))  # no half is left
    assert [memory.holds_inputs(block) for block in order[NUM_DEVICE:][:2]] == [False, True]
    memory.pool.release([*order, *more])
    assert memory.pool.num_free == NUM_DEVICE + NUM_HOST
    memory.pool.check_integrity()


def test_bad_requests_are_refused() -> None:
    memory = make()
    with pytest.raises(InvalidRequest, match="outside the sequence"):
        memory.read([0], KVSlice(0, 1, 0, 5))
    with pytest.raises(Incompatible, match="device memory"):
        memory.write([0], KVSlice(0, 1, 0, 4), DeviceBytes(1, torch.zeros(1, dtype=torch.uint8)))
    huge = KVLayout(num_layers=64, num_kv_heads=1024, head_dim=1024, dtype="float32", block_tokens=1024)
    with pytest.raises(Incompatible, match="no memory for the KV"):
        TieredKV(memory.device, 1 << 20, huge)
