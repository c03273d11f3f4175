"""The revisions of a service's tables, run by :mod:`celery_durable.store.migrate`."""

REVISIONS = ("0001", "0002", "0003")
"""The IDs of the revisions, oldest first."""
