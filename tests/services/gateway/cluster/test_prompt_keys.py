"""Prompts are looked up under the keys of every layout in the cluster."""

from dataclasses import replace

from halfmoon.kv.keys import block_keys, root_key
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.policy.view.block_index import BlockEvents, BlockIndex, short_keys
from services.gateway.cluster.prompt_keys import PromptKeys

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
OTHER = replace(LAYOUT, dtype="bfloat16")
PROMPT = list(range(30))  # seven blocks and a half


def index_of(**held: tuple[KVLayout, int]) -> BlockIndex:
    """An index in which each holder has the first blocks of the prompt in its layout."""
    index = BlockIndex()
    for name, (layout, num_blocks) in held.items():
        keys = block_keys(root_key("model", layout), PROMPT, 4)[:num_blocks]
        assert index.apply(index.number(name), BlockEvents(1, short_keys(keys), is_snapshot=True))
    return index


def test_each_holder_is_matched_in_its_own_layout() -> None:
    index = index_of(first=(LAYOUT, 3), second=(OTHER, 5))
    keys = PromptKeys("model", (LAYOUT, OTHER))
    keys.extend(PROMPT)
    held = keys.held(index)
    assert (held[index.number("first")], held[index.number("second")]) == (3, 5)
    alone = PromptKeys("model", (LAYOUT,))
    alone.extend(PROMPT)
    assert alone.held(index)[index.number("second")] == 0


def test_the_keys_of_an_answer_leave_those_of_its_prompt() -> None:
    prompt = PromptKeys("model", (LAYOUT,))
    prompt.extend(PROMPT[:10])
    longer, (before,) = prompt.continued(PROMPT), prompt.chains
    other = prompt.continued([*PROMPT[:10], *range(20)])
    assert longer.chains[0].keys == block_keys(root_key("model", LAYOUT), PROMPT, 4)
    assert other.chains[0].keys != longer.chains[0].keys
    assert prompt.chains == (before,)
    assert len(before.keys) == 2


def test_a_prompt_read_in_parts_has_the_same_keys() -> None:
    keys = PromptKeys("model", (LAYOUT, OTHER), b"salt")
    for end in (3, 9, 9, 30):
        keys.extend(PROMPT[:end])
    for layout in (LAYOUT, OTHER):
        chain = keys.chain(layout)
        assert chain is not None
        assert chain.keys == block_keys(root_key("model", layout, b"salt"), PROMPT, 4)
    assert keys.chain(replace(LAYOUT, dtype="float16")) is None
