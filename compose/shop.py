"""The app that compose.yaml runs: charges, at most five at once for each tenant."""

import os
import time

from celery import Celery

from celery_durable import DurableTask

app = Celery("shop", broker=os.environ["CELERY_BROKER_URL"])


@app.task(base=DurableTask, account="tenant:{tenant}", limit=5)
def charge(tenant: str, amount: int) -> str:
    """Takes a second, as an API of somebody else would."""
    time.sleep(1)
    return f"{tenant} paid {amount}"
