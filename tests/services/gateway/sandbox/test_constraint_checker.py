"""Constraints are compiled in processes that die alone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from halfmoon.engine.request import Constraint
from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.rpc.event_loop import ServiceLoop
from services.gateway.sandbox.constraint_checker import ConstraintChecker
from services.gateway.sandbox.sandbox import Sandbox
from services.gateway.sandbox.sandbox_process import SandboxProcess

GOOD = Constraint("regex", "[a-z]+")
CHAIN = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1_500)}
DEADLY = Constraint(  # its references are inside a grammar, where only llguidance looks
    "grammar", "start: %json " + json.dumps({"$defs": {**CHAIN, "d1500": {"type": "null"}}, "$ref": "#/$defs/d0"})
)
GREEDY = Constraint("regex", "a?" * 20_000)  # 800 MB
SLOW = Constraint(  # a GBNF grammar is read once for each level of its rules
    "grammar",
    "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1}\n" for i in range(240))
    + 'r240 ::= "a"\n'
    + "".join(f'w{i} ::= root | [a-z] "b" root | "c" root\n' for i in range(24_000)),
)


@asynccontextmanager
async def running_checker() -> AsyncIterator[ConstraintChecker]:
    async with Sandbox() as sandbox:
        yield ConstraintChecker(sandbox)


def deaths(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message == "sandbox.died" for record in caplog.records)


@pytest.mark.parametrize("bad", [DEADLY, GREEDY, SLOW], ids=["stack", "memory", "time"])
async def test_a_constraint_that_kills_its_process_is_refused(
    bad: Constraint, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_checker() as checker:
        with pytest.raises(InvalidRequest, match="too complex"):
            await checker.check(bad, "acme")
        assert deaths(caplog) == 1
        await checker.check(GOOD, "acme")
        with pytest.raises(InvalidRequest, match="too complex"):
            await checker.check(bad, "acme")
        assert deaths(caplog) == 1  # remembered


async def test_a_process_that_checked_others_before_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    async with running_checker() as checker:
        await checker.check(GOOD, "acme")
        with pytest.raises(InvalidRequest, match="too complex"):
            await checker.check(DEADLY, "acme")
        assert deaths(caplog) == 2


def test_a_process_that_was_killed_while_nobody_asked_it_is_replaced() -> None:
    """On the loop of services: there, writing to a process that has ended is a RuntimeError."""

    async def check() -> None:
        async with running_checker() as checker:
            await checker.check(GOOD, "acme")
            for process in checker._sandbox._idle:
                process._process.kill()
                await process._process.wait()
            await asyncio.sleep(0.05)  # until its pipes are seen to be closed
            await checker.check(Constraint("regex", "[0-9]+"), "acme")

    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        runner.run(check())


async def test_a_reason_that_repeats_a_long_source_is_cut() -> None:
    async with running_checker() as checker:
        with pytest.raises(InvalidRequest, match="invalid regex") as refusal:
            await checker.check(Constraint("regex", "(" * 50_000 + "a" + ")" * 50_000), "acme")
        assert len(refusal.value.message) <= 2_000


async def test_a_refusal_has_its_reason_and_is_no_death(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_checker() as checker:
        with pytest.raises(InvalidRequest, match="nothing"):
            await checker.check(Constraint("grammar", "start: nothing"), "acme")
        with pytest.raises(InvalidRequest, match="1048576"):
            await checker.check(Constraint("regex", "a" * (1 << 20 | 1)), "acme")
    assert deaths(caplog) == 0


async def test_a_process_that_gets_no_time_says_nothing_of_the_constraint() -> None:
    process = await SandboxProcess.start()
    with pytest.raises(Unavailable, match="busy"):
        await process.answer({"kind": GOOD.kind, "source": GOOD.source}, most_s=0.0)
    assert await process.end() < 0


async def test_equal_constraints_at_once_are_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running_checker() as checker:
        results = await asyncio.gather(*(checker.check(DEADLY, "acme") for _ in range(8)), return_exceptions=True)
        assert all(isinstance(result, InvalidRequest) for result in results)
    assert 1 <= deaths(caplog) <= 2


async def test_who_leaves_ends_the_process() -> None:
    async with running_checker() as checker:
        leaving = asyncio.create_task(checker.check(SLOW, "acme"))
        await checker.check(GOOD, "acme")  # in the other process
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await checker.check(GOOD, "acme")
