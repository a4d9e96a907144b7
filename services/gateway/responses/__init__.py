"""Responses that are kept, conversations made of them, and responses in the background."""
