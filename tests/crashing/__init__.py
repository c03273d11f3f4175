"""Crashes of real processes at named crash points (``celery_durable.crashpoints``)."""
