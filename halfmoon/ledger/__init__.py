"""What happened: one row per request, in SQLite or PostgreSQL, through SQLAlchemy.

Read in this order: models, ledger, row_queue, database, transaction, upgrade, stored_classes, retention.
"""
