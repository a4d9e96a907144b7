"""Admission: whether a request is served, by the targets of its class, and what is learned from it."""
