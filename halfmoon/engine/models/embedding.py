"""The table of tokens' vectors, as numbers, in blocks, or in a packed head that it shares."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from halfmoon.engine.models.blocks import Blocks
from halfmoon.engine.models.linear import Linear, PackWeight, RowSource


class Embedding:
    """Owns a table [num_embedded, width], unless a head has it."""

    def __init__(self, num_embedded: int, width: int, dtype: torch.dtype, device: str) -> None:
        """Uninitialised; filled through `weight` or `put_blocks`."""
        self.weight = torch.empty(num_embedded, width, dtype=dtype, device=device)
        self._blocks: Blocks | None = None
        self._rows: RowSource | None = None

    def put_blocks(self, blocks: Blocks) -> None:
        """Takes the table in blocks: what `weight` has is ignored."""
        self._blocks = blocks

    def pack(self, pack_weight: PackWeight, head: RowSource | None) -> None:
        """Looks up in `head`, a packed head of the same table, if there is one. Numbers stay as they are otherwise."""
        if head is None and self._blocks is not None:
            table = Linear(self.weight)
            table.put_blocks(0, self._blocks)
            table.pack(pack_weight)
            head = table.row_source
        self._rows, self._blocks = head, None
        if head is not None:
            self.weight = self.weight.new_empty(0)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: [num_tokens] -> [num_tokens, width]."""
        if self._rows is None:
            return functional.embedding(token_ids, self.weight)
        return self._rows.rows(token_ids)
