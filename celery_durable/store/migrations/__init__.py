"""The revisions of a service's tables, run by :mod:`celery_durable.store.migrate`."""
