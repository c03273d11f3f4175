"""The service crm: ``celery -A examples.api_calls.crm``."""

from examples.api_calls.service import make_app

app = make_app("crm")
