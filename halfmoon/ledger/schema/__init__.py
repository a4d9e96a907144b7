"""The ledger's migrations for alembic, one file a revision. A released one is never edited."""
