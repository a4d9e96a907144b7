"""Prompts of documents with a fact in each, and a question for one of them: does a model with other KV recall it?"""

from __future__ import annotations

import random
from itertools import accumulate
from pydoc_data.topics import topics
from typing import NamedTuple

from halfmoon.engine.text.tokenizer import Tokenizer

_SYSTEM = "<|im_start|>system\nYou answer questions about the documents below, briefly.<|im_end|>\n<|im_start|>user\n"
_QUESTION = "\n\nWhat is the secret number of {name}?<|im_end|>\n<|im_start|>assistant\n"
_OPENING = "The secret number of {name} is"
_NAMES = ("Alice", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo")


class Prompt(NamedTuple):
    """Token ids of the parts."""

    system: list[int]
    documents: list[list[int]]
    question: list[int]
    opening: list[int]  # of the answer
    number: list[int]  # what follows
    depth: int  # index of the document with the number

    @property
    def starts(self) -> list[int]:
        """Where each document begins, and the question."""
        return list(accumulate(map(len, self.documents), initial=len(self.system)))


def prompts(tokenizer: Tokenizer, num: int, num_documents: int, num_tokens: int) -> list[Prompt]:
    """Prompts of different passages; in the middle of one document is what the question asks for."""
    draw = random.Random(1)
    passages = [tokenizer.encode(text)[:num_tokens] for text in topics.values() if len(text) > 6 * num_tokens]
    result = []
    for _ in range(num):
        documents = [list(ids) for ids in draw.sample(passages, num_documents)]
        numbers = [str(draw.randrange(1000, 10000)) for _ in documents]
        names = draw.sample(_NAMES, num_documents)
        for ids, name, number in zip(documents, names, numbers, strict=True):
            middle = draw.randrange(num_tokens // 4, 3 * num_tokens // 4)
            fact = tokenizer.encode(f"\nThe secret number of {name} is {number}.\n")
            ids[middle : middle + len(fact)] = fact
        asked = draw.randrange(num_documents)
        question, opening = (tokenizer.encode(text.format(name=names[asked])) for text in (_QUESTION, _OPENING))
        answer = tokenizer.encode(f" {numbers[asked]}")
        result.append(Prompt(tokenizer.encode(_SYSTEM), documents, question, opening, answer, asked))
    return result
