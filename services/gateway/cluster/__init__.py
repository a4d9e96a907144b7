"""The workers: who is a member, what is known of each, and the connections to them. Imports no other shelf."""
