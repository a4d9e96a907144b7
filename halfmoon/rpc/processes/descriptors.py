"""How many files and connections a process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress

_MOST = 1 << 20  # more than any service needs; some hosts allow a thousand times that


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open files to the hard one, and returns it. The usual soft one, 1,024, is soon full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # some hosts promise a hard limit that they do not keep
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
