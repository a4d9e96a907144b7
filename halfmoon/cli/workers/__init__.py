"""Commands about single workers of a running system. Reading order: `control_api`, `drain`, `restart`,
`role`."""
