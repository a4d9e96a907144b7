"""Decisions: pure functions of a cluster view. The gateway runs them live, the simulator on a fake clock."""
