"""What happened, one row per request, and what clients have kept, in SQLite or PostgreSQL, through SQLAlchemy.

Read in this order: models, ledger, row_queue, database, transaction, upgrade, stored_classes, retention, leases,
stored_responses, pages, batches, stored_files.
"""
