"""Prompt -> KV + first token."""
