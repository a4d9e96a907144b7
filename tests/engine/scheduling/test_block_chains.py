"""Of which leading blocks a step tells: of a prompt's once, then of each new one; not of what came from elsewhere."""

from __future__ import annotations

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling.block_chains import BlockChains
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.step_result import BlockChain
from halfmoon.kv.owner import KVOwner

BLOCK = 16
OWNER = KVOwner("tenant", 100)
KEYS = [bytes([number]) for number in range(4)]


def computed(num_tokens: int, num_received: int = 0) -> Sequence:
    sequence = Sequence(
        EngineRequest("a", tuple(range(40)), SamplingParams(max_tokens=40), tenant_salt=b"t", owner=OWNER), 0
    )
    sequence.token_ids += [0] * max(num_tokens - 40, 0)
    sequence.num_computed, sequence.num_received = num_tokens, num_received
    sequence.block_keys = KEYS[: num_tokens // BLOCK]
    return sequence


def noted(sequence: Sequence, has_new: bool) -> list[int]:
    chains = BlockChains(BLOCK)
    chains.note(sequence, has_new)
    found = chains.take()
    assert chains.take() == ()
    assert all(one == BlockChain("a", one.keys, b"t", OWNER) for one in found)
    return [len(one.keys) for one in found]


def test_a_prompt_is_told_of_with_its_first_token_though_all_of_it_was_cached() -> None:
    assert noted(computed(40), has_new=False) == [2]


def test_an_output_is_told_of_when_it_fills_a_block() -> None:
    assert noted(computed(47), has_new=False) == []
    assert noted(computed(48), has_new=True) == [3]


def test_what_came_from_another_worker_is_its_own_to_tell() -> None:
    assert noted(computed(40, num_received=40), has_new=False) == []
    assert noted(computed(48, num_received=40), has_new=True) == [3]


def test_nothing_is_told_where_keys_are_not_known() -> None:
    sequence = computed(40)
    sequence.block_keys = []
    assert noted(sequence, has_new=True) == []
