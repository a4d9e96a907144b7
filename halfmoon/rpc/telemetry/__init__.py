"""What a service tells about its calls: logs, metrics, and traces over OTLP."""
