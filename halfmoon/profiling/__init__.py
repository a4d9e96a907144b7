"""Measuring live workers over their own RPCs, as gateways and other workers use them."""
