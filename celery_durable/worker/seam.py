"""Where an operation's attempts meet Celery's worker: what a durable task class takes from here.

The main process mints a run token for each message (``Request``); the tracer's wrapper starts the attempt by it, in
the process or thread that runs the body; the task's own backend settles it. Tasks that are applied eagerly or called
directly touch none of this, and write no rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_durable.worker.tracer import AttemptTracer

if TYPE_CHECKING:
    from celery_durable.worker.backend import SettlingBackend


class WorkerSeam:
    """Mixin of a task class, before ``celery.Task``: its messages run as attempts of operations."""

    Request = "celery_durable.worker.request:DurableRequest"
    __trace__ = AttemptTracer()
    _durable_backend: SettlingBackend | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # ``@app.task(backend=…)`` makes a class attribute, which would shadow the property: it is where to forward to.
        super().__init_subclass__(**kwargs)
        backend = cls.__dict__.get("backend")
        if backend is not None and not isinstance(backend, property):
            cls._backend = backend
            del cls.backend

    @property
    def backend(self) -> Any:
        """Settles this task's attempts, reads its results from SQL, and forwards to the app's result backend."""
        backend = self._durable_backend
        if backend is None:
            from celery_durable.worker.backend import SettlingBackend

            backend = self._durable_backend = SettlingBackend(self)
        return backend

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value
