"""How blocks move: in from workers and other stores, out to readers, down to slower tiers and back up."""
