"""When KV is encoded and decoded for a hand-over: each worker's codec takes one request after the other."""

from __future__ import annotations

from halfmoon.sim.cluster.cluster_spec import Network


class CodecQueues:
    """Owns until when each worker's codec has work, at either end. Knows workers by numbers, and nothing of links."""

    def __init__(self, network: Network, num_workers: int) -> None:
        self._encode_s_per_byte = 1 / network.encode_bytes_per_s if network.encode_bytes_per_s else 0.0
        self._decode_s_per_byte = 1 / network.decode_bytes_per_s if network.decode_bytes_per_s else 0.0
        self._encoder_free_s = [0.0] * num_workers
        self._decoder_free_s = [0.0] * num_workers

    def code(self, sender: int, receiver: int, num_bytes: float, ready_s: float, now_s: float) -> float:
        """When all is decoded of what could be encoded from `ready_s` on and is complete `now_s`.

        The two ends work side by side: what is encoded is decoded at once.
        """
        if not self._encode_s_per_byte and not self._decode_s_per_byte:
            return now_s
        encoded_s = max(self._encoder_free_s[sender], ready_s) + num_bytes * self._encode_s_per_byte
        begun_s = max(self._decoder_free_s[receiver], encoded_s - num_bytes * self._encode_s_per_byte)
        decoded_s = max(encoded_s, begun_s + num_bytes * self._decode_s_per_byte)
        self._encoder_free_s[sender], self._decoder_free_s[receiver] = encoded_s, decoded_s
        return max(decoded_s, now_s)
