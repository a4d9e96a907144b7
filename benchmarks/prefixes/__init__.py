"""How soon a first token comes behind a prefix, or a prompt, that others have or compute."""
