"""Replies."""
