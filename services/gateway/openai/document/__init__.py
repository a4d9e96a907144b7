"""What the API takes, for programs and readers: the OpenAPI document, its page, and the table of parameters."""
