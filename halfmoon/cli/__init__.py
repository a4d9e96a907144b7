"""The `halfmoon` command: one file per subcommand.

Read in this order: app, up/up_flags, up/flags, up/config, credentials/secret, credentials/certs, planning/plan,
simulate, replay, bench, profile, kv, credentials/keys, top.
"""
