"""How KV bytes travel: one stream of frames for every transfer, and several places where their payloads may lie.

Read in this order:

protocol.py     the interface of a transport: an outlet at the sender, an inlet at the receiver
link.py         KVLink: what successive transfers to one receiver share
sending.py      one outgoing transfer
receiving.py    one incoming transfer
inline.py       payloads inside their messages
shm.py          payloads in shared memory on one host
nixl.py         payloads that the receiver pulls out of the sender's memory, over any network that UCX finds
cuda_ipc.py     payloads in device memory that both ends share, on one host
ranks.py        payloads that ranks of several hosts pass on among themselves
rank_fetches.py how they do: each host serves what its ranks keep
slots.py        shared memory cut into slots of one payload each
memfd.py        shared memory handed over without a name that could outlive it
window.py       bytes in flight on a link
limiter.py      a throttled link, for experiments
estimate.py     how fast a link is
"""
