"""What encodings, transfers, stores and the index of KV cost."""
