"""THE KV CONTRACT. Block keys, layout, codecs, frames. numpy + bytes, no torch, no I/O."""
