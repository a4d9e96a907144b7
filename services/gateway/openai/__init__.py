"""The OpenAI API's requests: schemas of the bodies, and what each asks the model to generate.

Imports `replies`, `cluster` and `http`.
"""
