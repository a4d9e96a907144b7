"""The ledger's migrations for alembic, one file per revision. A released one is never edited."""
