"""Two services share the limits of an API's tenants, through a killed worker and a restarted holder.

``python -m examples.api_calls`` runs it. ``service.py`` is what a user of celery-durable writes; the rest is the API
that is called (``api.py``, the independent witness) and the stage around it.
"""
