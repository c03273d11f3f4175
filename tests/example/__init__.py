"""The Celery app that tests run real workers of."""
