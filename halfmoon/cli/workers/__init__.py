"""Commands about single workers of a running system. Reading order: `drain`, `restart`, `role`."""
