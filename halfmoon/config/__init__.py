"""What a system can be told: one definition of each option, shared by the services' settings and `halfmoon.yaml`.

Read in this order: section, worker, stores, gateway, qos_classes, security, observability.
"""
