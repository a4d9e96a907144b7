"""Arguments of services follow the host that they got."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from halfmoon.errors import Incompatible
from halfmoon.up.on_ray.rooms import Place, on_host, resources, worker_room
from halfmoon.up.supervision.child import Room, ServiceSpec

PLACE = Place("node-b", "10.0.0.2", "beta", "/opt/python")
WORKER = ServiceSpec(
    "prefill-0",
    ("-m", "services.prefill", "--listen", "10.0.0.1:0", "--kv-store", "10.0.0.1:7", "--metrics-port", "9"),
    {},
    room=Room(num_cpus=2.0, num_gpus=1),
)


def test_a_worker_listens_on_its_host_and_uses_the_store_there() -> None:
    placed = on_host(WORKER, PLACE, 4_000, {"node-a": "10.0.0.1:7", "node-b": "10.0.0.2:8"})
    expected = ("--listen", "10.0.0.2:0", "--kv-store", "10.0.0.2:8", "--metrics-port", "4000")
    assert placed.arguments == ("-m", "services.prefill", *expected)
    assert (placed.python, placed.metrics_port) == ("/opt/python", 4_000)


def test_without_a_store_on_its_host_it_keeps_the_one_that_it_was_given() -> None:
    placed = on_host(WORKER, PLACE, 4_000, {"node-a": "10.0.0.1:7"})
    assert placed.arguments[4:6] == ("--kv-store", "10.0.0.1:7")


def test_a_store_keeps_the_address_that_others_were_told() -> None:
    store = replace(WORKER, arguments=("-m", "services.kvstore", "--listen", "10.0.0.2:55"), room=Room(node="node-b"))
    placed = on_host(store, PLACE, 4_000, {})
    assert placed.arguments == store.arguments
    assert placed.metrics_port is None


def test_an_interpreter_that_was_named_stays() -> None:
    placed = on_host(replace(WORKER, python="/vllm/python"), PLACE, 0, {})
    assert (WORKER.python, placed.python) == (sys.executable, "/vllm/python")


def test_a_room_without_gpus_asks_for_none() -> None:
    assert resources(Room(num_cpus=2.0)) == {"CPU": 2.0}
    assert resources(Room(num_cpus=1.0, num_gpus=4)) == {"CPU": 1.0, "GPU": 4.0}


def test_a_worker_that_no_host_has_room_for_is_divided_by_stages() -> None:
    assert worker_room(4, 2, False, 4, "u") == Room(4.0, unit="u")
    assert worker_room(4, 2, False, 3, "u") == Room(2.0, rest=(Room(2.0),))
    assert worker_room(6, 2, True, 4, "") == Room(1.0, 4, rest=(Room(1.0, 2),))
    with pytest.raises(Incompatible, match="no host of the Ray cluster has the 4 GPUs of one pipeline stage: 3 is"):
        worker_room(8, 4, True, 3, "")
