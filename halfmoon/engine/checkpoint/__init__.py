"""A model's files: found, converted, described and prepared without loading weights."""
