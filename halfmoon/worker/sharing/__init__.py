"""Prompts that several prefill workers compute together: what each serves to the others, and loads from them."""
