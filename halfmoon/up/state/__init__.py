"""What `halfmoon up` keeps in its state directory: its lock, certificates, addresses and targets for Prometheus."""
