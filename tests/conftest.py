"""What holds for the whole suite."""

from __future__ import annotations

from hypothesis import settings

# A deadline of an example asserts a timing, and a busy machine fails it.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
