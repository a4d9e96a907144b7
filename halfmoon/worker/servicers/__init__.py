"""The calls that a worker answers: prefill, decode, tokens to gateways, and reads of its prefix cache."""
