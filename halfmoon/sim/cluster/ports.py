"""When bytes arrive: each node has one port in each direction, and a port carries one transfer after the other."""

from __future__ import annotations

from halfmoon.sim.cluster.cluster_spec import Network

_LAST_FRAME_BYTES = 2 << 20  # of a hand-over that was sent while it was computed: what is left at its end


class Ports:
    """Owns until when each port is taken. Knows nodes by numbers, and nothing of what is sent."""

    def __init__(self, network: Network, num_nodes: int) -> None:
        self._network = network
        self._out_free_s = [0.0] * num_nodes
        self._in_free_s = [0.0] * num_nodes
        self.num_bytes = 0.0

    def send(self, sender: int, receiver: int, num_bytes: float, ready_s: float, now_s: float) -> float:
        """When the last byte arrives of what could be sent from `ready_s` on and is complete `now_s`.

        Within a node transfers do not hinder each other. Where bytes went ahead, a last frame is left at least.
        """
        network = self._network
        self.num_bytes += num_bytes
        is_near = sender == receiver
        speed = network.node_bytes_per_s if is_near else network.bytes_per_s
        begin_s = ready_s
        if not is_near:
            begin_s = max(ready_s, self._out_free_s[sender], self._in_free_s[receiver])
        last_s = min(num_bytes, _LAST_FRAME_BYTES) / speed
        end_s = max(begin_s + num_bytes / speed, now_s + last_s)
        if not is_near:
            self._out_free_s[sender] = self._in_free_s[receiver] = end_s
        return end_s + network.latency_s

    def wait_s(self, sender: int, receiver: int, now_s: float) -> float:
        """Until both ports are free."""
        if sender == receiver:
            return 0.0
        return max(self._out_free_s[sender] - now_s, self._in_free_s[receiver] - now_s, 0.0)

    def speed(self, sender: int, receiver: int) -> float:
        """Bytes a second."""
        return self._network.node_bytes_per_s if sender == receiver else self._network.bytes_per_s
