"""Bodies of requests: their schemas, and how they are parsed."""
