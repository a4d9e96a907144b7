"""Lines are found whatever pieces the file comes in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.batches.input_lines import input_lines


async def found(chunks: Sequence[bytes], max_bytes: int) -> list[tuple[int, bytes | None]]:
    async def given_chunks() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [line async for line in input_lines(given_chunks(), max_bytes)]


@given(
    st.lists(st.sampled_from([b"", b" ", b"\r", b"a", b"bb", b"x" * 9, b"y" * 10])), st.integers(1, 12), st.booleans()
)
def test_pieces_do_not_matter(lines: list[bytes], size: int, ends: bool) -> None:
    content = b"\n".join(lines) + (b"\n" if ends else b"")
    chunks = [content[start : start + size] for start in range(0, len(content), size)]
    wanted = [None if len(line) > 9 else line for line in lines if line.strip()]
    assert asyncio.run(found(chunks, 9)) == list(enumerate(wanted))
