"""How KV bytes travel: one stream of frames for every transfer, and several places where their payloads may lie.

link.py         KVLink: what successive transfers to one receiver share
sending.py      one outgoing transfer
receiving.py    one incoming transfer
protocol.py     what a transport is: an outlet at the sender, an inlet at the receiver
shm.py          payloads in shared memory on one host
memfd.py        how that memory is handed over without a name that could outlive it
window.py       bytes under way on a link
limiter.py      a link made slow on purpose
estimate.py     how fast a link is
"""
