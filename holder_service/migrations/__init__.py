"""The revisions of the holder's tables, run by :mod:`celery_durable.store.migrate`."""

from celery_durable.store.migrate import Migrations

HOLDER = Migrations("holder_service.migrations", ("0001",), "holder-service migrate")
"""The revisions of a holder's tables."""
