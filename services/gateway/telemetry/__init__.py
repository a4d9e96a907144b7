"""What the gateway measures: the record of each request, metrics, and the last minutes for the console.

Imports `cluster` and `http`.
"""
