"""Which workers are measured, and what is said where they cannot be."""

from __future__ import annotations

import pytest
from aiohttp import ClientSession, web

from halfmoon.errors import HalfmoonError, InvalidRequest, NoCapacity, Unavailable
from halfmoon.profiling.target import Cluster, Target, check_idle, choose_targets, fetch_cluster
from tests.profiling.profiling_fakes import target

PREFILL, DECODE, IDLE = target("prefill"), target("decode", num_requests=3), target("decode", 1)


def cluster(*workers: Target) -> Cluster:
    return Cluster("http://gateway", "model", workers)


def test_one_worker_of_each_role_the_least_loaded_one() -> None:
    found = choose_targets(cluster(PREFILL, DECODE, IDLE), ())
    assert {worker.worker_id for worker in found} == {"prefill-0", "decode-1"}
    both = target("both")
    assert choose_targets(cluster(both), ()) == [both]
    assert choose_targets(cluster(PREFILL, DECODE, IDLE), ("decode-1", "prefill-0")) == [IDLE, PREFILL]


@pytest.mark.parametrize(
    ("workers", "names", "error", "says"),
    [
        ((PREFILL,), ("decode-7",), InvalidRequest, "knows no worker decode-7: there are prefill-0"),
        ((), ("decode-7",), InvalidRequest, "there are none"),
        ((PREFILL,), (), InvalidRequest, r"takes decode; there is prefill-0 \(prefill\)"),
        ((), (), InvalidRequest, "takes prefill; there is no worker at all"),
        ((PREFILL, DECODE), (), NoCapacity, r"worker decode-0 is busy \(3 requests\).*Profile it while it is idle"),
    ],
)
def test_what_cannot_be_measured_names_the_worker(
    workers: tuple[Target, ...], names: tuple[str, ...], error: type[HalfmoonError], says: str
) -> None:
    with pytest.raises(error, match=says):
        choose_targets(cluster(*workers), names)


def test_idle_workers_pass() -> None:
    check_idle([PREFILL, IDLE])
    assert (PREFILL.can("prefill"), PREFILL.can("decode"), target("both").can("decode")) == (True, False, True)
    assert target(address="[::1]:7001").host == "[::1]"


@pytest.mark.parametrize(
    ("status", "body", "error", "says"),
    [
        (403, {}, InvalidRequest, "wants the operator token: --token"),
        (500, {}, Unavailable, "no halfmoon gateway of this release answers"),
        (200, {"workers": []}, Unavailable, "KeyError"),
        (200, {"model_fingerprint": "f", "served_model": "m", "workers": [{}]}, Unavailable, "no halfmoon gateway"),
    ],
)
async def test_a_gateway_that_cannot_be_used_is_named(
    status: int, body: dict[str, object], error: type[HalfmoonError], says: str
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_get("/halfmoon/v1/cluster", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        async with ClientSession() as session:
            with pytest.raises(error, match=says):
                await fetch_cluster(session, url)
    finally:
        await runner.cleanup()
