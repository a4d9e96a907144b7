"""Mutual TLS: who a certificate is for, the authority that issues them, files that change while a service runs.

Read in this order: names, certificates, authority, watched_files, identity_files, server_credentials, channel,
http_context.
"""
