"""Commands about single workers of a running system. Reading order: `gateway_options`, `drain`, `restart`,
`role`."""
