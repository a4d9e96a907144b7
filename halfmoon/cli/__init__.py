"""The `halfmoon` command: one file per subcommand, and the tables and progress bars that they print.

Read in this order: app, up_flags, config, plan, plan_tables, simulate, replay, profile, kv, top.
"""
