"""Flags and configuration of `halfmoon up`, and hosts that join it."""
