"""`halfmoon replay`: a trace against a live gateway, in its own time or faster, and how well it was served."""
