"""Share of valid outputs under random JSON schemas, from a running system.

    python -m benchmarks.engine.structured http://127.0.0.1:8000 [--model demo] [--schemas 200]

Each schema is requested at temperature 1, streamed or not, as a chat or a completion.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from random import Random
from typing import Any

import jsonschema
from openai import AsyncOpenAI

from tests.engine.random_schemas import random_schema

_AT_ONCE = 8
_QUESTION = "Tell me about Ann."


async def answer(client: AsyncOpenAI, model: str, schema: dict[str, Any], number: int) -> tuple[str, str | None]:
    """Requests one output; returns its text and finish reason."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if number % 3 == 0:
        extra = {"structured_outputs": {"json": schema}}
        whole = await client.completions.create(
            model=model, prompt=_QUESTION, max_tokens=1_000, seed=number, extra_body=extra
        )
        return whole.choices[0].text, whole.choices[0].finish_reason
    messages: Any = [{"role": "user", "content": _QUESTION}]
    if number % 3 == 1:
        chat = await client.chat.completions.create(model=model, messages=messages, seed=number, response_format=form)
        return chat.choices[0].message.content or "", chat.choices[0].finish_reason
    stream = await client.chat.completions.create(
        model=model, messages=messages, seed=number, response_format=form, stream=True
    )
    text, reason = "", None
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


def verdict(schema: dict[str, Any], text: str, reason: str | None) -> str:
    """Classifies one output."""
    if reason != "stop":
        return f"ended by {reason}"
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"{text!r} under {json.dumps(schema)}: {str(error)[:200]}")
        return "invalid"
    return "valid"


async def measure(url: str, model: str, num_schemas: int) -> None:
    """Sends the requests and prints the counts."""
    rng, places, outcomes = Random(2026), asyncio.Semaphore(_AT_ONCE), Counter[str]()
    schemas = [random_schema(rng) for _ in range(num_schemas)]

    async def request_one(number: int, schema: dict[str, Any]) -> None:
        async with places:
            outcomes[verdict(schema, *await answer(client, model, schema, number))] += 1

    started_s = time.perf_counter()
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        asyncio.TaskGroup() as asking,
    ):
        for number, schema in enumerate(schemas):
            asking.create_task(request_one(number, schema))
    print(
        ", ".join(f"{count} {name}" for name, count in outcomes.most_common()),
        f"in {time.perf_counter() - started_s:.0f} s",
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--schemas", type=int, default=200)
    options = parser.parse_args()
    asyncio.run(measure(options.url.rstrip("/"), options.model, options.schemas))


if __name__ == "__main__":
    main()
