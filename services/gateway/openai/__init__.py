"""Openai."""
