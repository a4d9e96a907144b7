"""Generates the parameters in docs/reference/api.md: `python -m services.gateway.openai.document.parameter_table`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from services.gateway.openai.bodies.anthropic_body import CountedBody, MessagesBody
from services.gateway.openai.bodies.batch_body import BatchBody
from services.gateway.openai.bodies.embeddings_body import EmbeddingsBody
from services.gateway.openai.bodies.responses_body import ResponsesBody
from services.gateway.openai.bodies.schemas import ChatBody, CompletionBody
from services.gateway.openai.bodies.strict_model import Part
from services.gateway.openai.bodies.tokenizer_bodies import DetokenizeBody, TokenizeBody
from services.gateway.openai.bodies.unsupported import IGNORED, REFUSED

ENDPOINTS: dict[str, type[Part]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountedBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/batches": BatchBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def parameter_table() -> str:
    """The table in Markdown: the parameters of each endpoint, then the ignored and the refused ones with the reason."""
    return (
        "\n\n".join([*(_supported(path, schema) for path, schema in ENDPOINTS.items()), _ignored(), _refused()]) + "\n"
    )


def _supported(path: str, schema: type[Part]) -> str:
    rows = [
        f"| `{name}` | {field.description or 'only null or false'} |" for name, field in schema.model_fields.items()
    ]
    return "\n".join([f"### `{path}`", "", "| parameter | |", "|---|---|", *rows])


def _ignored() -> str:
    rows = [f"| `{name}` | {why} |" for name, why in sorted(IGNORED.items())]
    return "\n".join(["### Ignored", "", "| parameter | because |", "|---|---|", *rows])


def _refused() -> str:
    return "\n".join(["### Refused", "", "| parameter | accepted at | else 400, because |", "|---|---|---|", *_rows()])


def _rows() -> Iterator[str]:
    for name, (why, neutral) in sorted(REFUSED.items()):
        values = ", ".join(["`null`", *(f"`{_json(value)}`" for value in neutral)])
        yield f"| `{name}` | {values} | {why} |"


def _json(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"') or '""'


if __name__ == "__main__":
    sys.stdout.write(parameter_table())
