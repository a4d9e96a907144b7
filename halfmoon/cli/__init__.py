"""The `halfmoon` command: one file per subcommand, and the tables and progress bars that they print.

Read in this order: app, up_flags, flags, config, secret, certs, plan, simulate, replay, bench,
profile, kv, keys, top.
"""
