"""What happened: one row a request, in SQLite or any other database that SQLAlchemy speaks to."""
