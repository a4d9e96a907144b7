"""Judgement of addresses: whether one is loopback, which names a browser may use, what of a URL may be shown."""
