"""THE KV CONTRACT. Block keys, layout, codecs, frames. numpy + bytes, no torch, no I/O.

Read in this order: kv_layout, keys, owner, codec, frame, receiver, sender, frame_plan, negotiation.
"""
