"""How KV bytes travel: one stream of frames for every transfer, and several places where their payloads may lie.

link.py         KVLink: what successive transfers to one receiver share
sending.py      one outgoing transfer
receiving.py    one incoming transfer
protocol.py     what a transport is: an outlet at the sender, an inlet at the receiver
inline.py       payloads in their messages
shm.py          payloads in shared memory on one host
nixl.py         payloads that the receiver pulls out of the sender's memory, over what UCX finds
cuda_ipc.py     payloads in device memory that both ends share, on one host
slots.py        such memory, cut into places of one payload each
memfd.py        how that memory is handed over without a name that could outlive it
window.py       bytes under way on a link
limiter.py      a link made slow on purpose
estimate.py     how fast a link is
freed_memory.py why the memory of messages is not given back
"""
