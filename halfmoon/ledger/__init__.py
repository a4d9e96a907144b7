"""What happened, one row per request, and what clients have kept, in SQLite or PostgreSQL, through SQLAlchemy.

Read in this order: models, ledger, history/row_queue, connection/database, connection/transaction, connection/upgrade,
edits/stored_classes, history/retention, kept/leases, kept/stored_responses, kept/pages, kept/batches,
kept/stored_files.
"""
