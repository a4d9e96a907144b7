"""Arguments of services follow the host that they got."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from halfmoon.errors import Incompatible
from halfmoon.up.on_ray.rooms import LargestHosts, Place, divided, on_host, resources, wanted, worker_room
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
    assert resources([Room(num_cpus=2.0)]) == {"CPU": 2.0}
    assert resources([Room(num_cpus=1.0, num_gpus=4), Room()]) == {"CPU": 2.0, "GPU": 4.0}


def test_a_room_of_a_kind_of_gpu_asks_for_a_host_that_has_it() -> None:
    room = worker_room(2, 2, True, "", "H100")
    assert room == Room(1.0, 2, gpu="H100")
    assert resources([room]) == {"CPU": 1.0, "GPU": 2.0, "accelerator_type:H100": 0.001}
    assert wanted([room, room]) == "2 CPU and 4 H100"
    assert wanted([Room(num_cpus=0.0)]) == "room"


def test_kinds_of_gpu_are_those_that_hosts_name() -> None:
    hosts = LargestHosts(
        [
            {"CPU": 8.0},
            {"CPU": 4.0, "GPU": 8.0, "accelerator_type:A100": 1.0},
            {"GPU": 4.0, "accelerator_type:H200": 1.0},
        ]
    )
    assert (hosts.has_gpus, hosts.most_cpus()) == (True, 8)
    assert [hosts.kind(planned) for planned in ("a100-80g", "h200", "h100")] == ["A100", "H200", "H100"]
    assert [hosts.most_gpus(kind) for kind in ("A100", "H200", "H100", "")] == [8, 4, 8, 8]
    named = LargestHosts([{"GPU": 8.0, "accelerator_type:A100": 1.0, "accelerator_type:A100-80G": 1.0}])
    assert named.kind("a100-80g") == "A100-80G"
    silent = LargestHosts([{"CPU": 2.0, "GPU": 1.0}])
    assert (silent.kind("h200"), LargestHosts([]).has_gpus) == ("", False)


def test_a_worker_that_no_host_has_room_for_is_divided_by_stages() -> None:
    def alone(room: Room, most: int) -> Room:
        return divided({"a": room}, most)["a"]

    cut = worker_room(4, 2, False, "u")
    assert alone(cut, 4) == cut == Room(4.0, unit="u", num_stages=2)
    assert alone(cut, 3) == Room(2.0, unit="u", num_stages=2, rest=(Room(2.0),))
    assert alone(worker_room(6, 2, True, ""), 4) == Room(1.0, 4, num_stages=3, rest=(Room(1.0, 2),))
    assert alone(cut, 0) == cut  # hosts may yet come
    with pytest.raises(
        Incompatible, match="no host of the Ray cluster has the 4 GPUs of one pipeline stage of a: 3 is"
    ):
        alone(worker_room(8, 4, True, ""), 3)


def test_a_pair_that_no_host_has_room_for_has_the_same_stages_on_each() -> None:
    pair = {"prefill-0": worker_room(8, 2, True, "u", "H100"), "decode-0": worker_room(4, 1, True, "u", "H100")}
    assert divided(pair, 12) == pair
    prefill, decode = divided(pair, 8).values()
    assert [room.num_gpus for room in (prefill, *prefill.rest)] == [4, 4]
    assert [room.num_gpus for room in (decode, *decode.rest)] == [2, 2]
    assert {(room.gpu, room.num_cpus) for room in (prefill, *prefill.rest, decode, *decode.rest)} == {("H100", 1.0)}
    prefill, _ = divided(pair, 9).values()  # the fourth stage is alone
    assert [room.num_gpus for room in (prefill, *prefill.rest)] == [6, 2]
    with pytest.raises(Incompatible, match="the 3 GPUs of one pipeline stage of prefill-0 and decode-0: 2 is the most"):
        divided(pair, 2)
    with pytest.raises(Incompatible, match="the 10 GPUs of prefill-0 and decode-0 together: 8 is the most"):
        divided(pair | {"decode-0": worker_room(2, 1, True, "u", "H100")}, 8)
