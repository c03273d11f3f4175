"""The holder: the one authority for each account's permits. Never loads Celery."""
