"""The `halfmoon` command: one file per subcommand.

Read in this order: app, up/up_flags, up/flags, up/config, credentials/secret, credentials/certs, planning/plan,
simulate, replay, bench, gateway_options, profile, kv, credentials/keys, top.
"""
