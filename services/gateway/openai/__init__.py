"""The OpenAI API's requests: schemas of the bodies, and what each asks the model to generate.

Read in this order: `bodies/schemas.py`, `endpoint_bodies.py`, `generation_request.py`, `prompts.py`, `sampling.py`,
`tooling/tool_use.py`. Imports `replies`, `cluster` and `http`. Of the shelves, `bodies` imports no other, and
`document` only `bodies`.
"""
