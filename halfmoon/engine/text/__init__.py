"""Text to token ids and back, whole or from its beginning. No torch."""
