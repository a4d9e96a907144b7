"""The ledger's database: its connections, transactions with deadlines, and upgrades of its tables."""
