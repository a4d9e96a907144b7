"""Certificates, tenants' keys and the cluster's secret."""
