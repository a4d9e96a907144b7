"""A request's own chat template has bounds, whatever it does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from halfmoon.errors import InvalidRequest
from services.gateway.sandbox.request_templates import RequestTemplates
from services.gateway.sandbox.sandbox import Sandbox

MESSAGES = {"messages": [{"role": "user", "content": "h\ud800i"}]}


async def rendered(*sources: str, **variables: Any) -> str:
    """The last one's text."""
    async with Sandbox() as sandbox:
        templates = RequestTemplates(sandbox, asyncio.get_running_loop())
        texts = [
            await asyncio.to_thread(templates.render, "me", source, {**MESSAGES, **variables}) for source in sources
        ]
        return texts[-1]


async def test_the_text_is_whole() -> None:
    assert (
        await rendered("{% for m in messages %}{{ m.content }}{% endfor %}{{ x | tojson }}", x=["é"]) == 'h\ud800i["é"]'
    )


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more time or memory"),
        ("{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "Recursion"),
        ("{{ range(100001) | list }}", "Range too big"),
        ("{{ 'x' * 9999999999 }}", "MemoryError"),
        ("{{ messages[0].role * 9999999 }}", "writes 39999996 characters"),
        ("{% set ns = namespace(x='x') %}{% for _ in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "Memory"),
        ("{{ 'x' | center(9999999999) }}", "MemoryError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[9].content }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ raise_exception('my own words') }}", "chat_template: my own words"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
async def test_what_a_template_does_is_the_clients_mistake(template: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refusal:
        await rendered(template)
    assert refusal.value.param == "chat_template"


async def test_one_template_leaves_the_next_alone() -> None:
    async with Sandbox() as sandbox:
        templates = RequestTemplates(sandbox, asyncio.get_running_loop())
        with pytest.raises(InvalidRequest):
            await asyncio.to_thread(templates.render, "me", "{{ 'x' * 9999999999 }}", {})
        assert await asyncio.to_thread(templates.render, "me", "{{ x }}", {"x": 1}) == "1"


async def test_tenants_take_turns() -> None:
    """Whoever sends many delays its own."""
    ended: list[str] = []

    async def render(templates: RequestTemplates, tenant: str) -> None:
        await asyncio.to_thread(templates.render, tenant, "{% for a in range(99999) %}{% endfor %}", {})
        ended.append(tenant)

    async with Sandbox() as sandbox, asyncio.TaskGroup() as tasks:
        templates = RequestTemplates(sandbox, asyncio.get_running_loop())
        async with templates._turns.turn("someone", 60):
            for _ in range(4):
                tasks.create_task(render(templates, "many"))
            while len(templates._turns._waiting.get("many", ())) < 4:  # noqa: ASYNC110 (it has no event)
                await asyncio.sleep(0)
            tasks.create_task(render(templates, "one"))
            while "one" not in templates._turns._waiting:  # noqa: ASYNC110
                await asyncio.sleep(0)
    assert ended.index("one") <= 1
