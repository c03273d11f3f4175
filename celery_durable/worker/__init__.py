"""The seam to a Celery worker: start, heartbeat and settle of attempts (design, section 6)."""
