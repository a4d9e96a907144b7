"""Rows of earlier requests: written behind them, read for analysis, and deleted when old. And changes of workers."""
