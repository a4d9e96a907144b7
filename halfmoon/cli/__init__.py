"""The `halfmoon` command: one file a subcommand, and the tables and progress bars that they print."""
