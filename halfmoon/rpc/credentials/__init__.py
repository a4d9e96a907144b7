"""Who may call what inside a cluster: one secret, a token for each role, and the check of every call.

Read in this order: roles, credential, sources, child_environment, issue, access, refusals, listeners, api_keys,
operator_token.
"""
