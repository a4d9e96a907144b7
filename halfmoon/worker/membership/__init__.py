"""What a worker tells its gateways: who it is, how fast it is, its load, and which blocks it has."""
