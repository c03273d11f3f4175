"""The service billing: ``celery -A examples.api_calls.billing``."""

from examples.api_calls.service import make_app

app = make_app("billing")
