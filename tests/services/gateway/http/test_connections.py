"""Who gives way when there are too many connections."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http.connections import Admission, Connections

IN = Admission[str]()


def test_the_silent_give_way_before_the_idle_and_the_busy_never() -> None:
    connections = Connections[str](3, 0)
    for name in ("busy", "idle", "silent"):
        assert connections.admit(name, name) == IN
    connections.note_busy("busy")
    connections.note_busy("idle")
    connections.note_idle("idle")
    assert connections.admit("new", "x") == Admission(evicted="silent", bound="total")
    connections.note_busy("new")
    assert connections.admit("newer", "x") == Admission(evicted="idle", bound="total")
    connections.note_busy("newer")
    assert connections.admit("newest", "x") == Admission(is_admitted=False, bound="total")
    connections.forget("busy")
    assert connections.admit("newest", "x") == IN
    assert len(connections) == 3


def test_the_longest_idle_gives_way() -> None:
    connections = Connections[str](2, 0)
    for name in "ab":
        connections.admit(name, name)
        connections.note_busy(name)
    for name in "ba":
        connections.note_idle(name)
    assert connections.admit("c", "c").evicted == "b"


def test_a_client_has_a_bound_of_its_own_and_gives_way_to_itself() -> None:
    connections = Connections[str](100, 2)
    connections.admit("other", "10.0.0.2")
    connections.admit("a", "10.0.0.1")
    connections.admit("b", "10.0.0.1")
    assert connections.admit("c", "10.0.0.1") == Admission(evicted="a", bound="client")
    connections.note_busy("b")
    connections.note_busy("c")
    assert connections.admit("d", "10.0.0.1") == Admission(is_admitted=False, bound="client")
    assert connections.admit("d", "10.0.0.3") == IN


def test_a_site_of_ipv6_is_one_client() -> None:
    connections = Connections[str](100, 1)
    connections.admit("a", "2001:db8::1")
    assert connections.admit("b", "2001:db8::ffff:2").bound == "client"
    assert connections.admit("c", "2001:db8:0:1::1") == IN
    assert connections.admit("d", "::ffff:10.0.0.1") == IN
    assert connections.admit("e", "10.0.0.1").bound == "client"
    assert connections.admit("f", "fe80::1%eth0") == IN


def test_the_last_descriptor_counts_as_the_bound() -> None:
    connections = Connections[str](100, 0)
    connections.admit("a", "x")
    assert connections.admit("b", "y", is_last=True) == Admission(evicted="a", bound="total")


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "busy", "idle", "forget"]), st.integers(0, 9), st.sampled_from("xyz"))
    ),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_no_bound_is_ever_passed(steps: list[tuple[str, int, str]], most: int, per_client: int) -> None:
    connections = Connections[int](most, per_client)
    clients: dict[int, str] = {}
    for what, number, client in steps:
        if what == "admit" and number not in clients:
            admission = connections.admit(number, client)
            if admission.evicted is not None:
                del clients[admission.evicted]
            if admission.is_admitted:
                clients[number] = client
        elif what == "busy":
            connections.note_busy(number)
        elif what == "idle" and number in clients:
            connections.note_busy(number)
            connections.note_idle(number)
        elif what == "forget":
            connections.forget(number)
            clients.pop(number, None)
        assert len(connections) == len(clients) <= most
        if per_client:
            assert all(list(clients.values()).count(one) <= per_client for one in "xyz")
