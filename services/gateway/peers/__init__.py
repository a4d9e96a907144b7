"""Peer gateways: what this one would refuse is offered to another, which predicts whether it is in time."""
