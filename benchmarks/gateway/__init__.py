"""What the gateway's decisions and its relay cost."""
