"""After a crash each operation ends as it should, run as often as the crash explains, and nothing stays held."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from celery_durable.store.schema import SUCCEEDED
from tests.crashing.orders import Orders
from tests.e2e.observe import History, holder_rows, in_use, operation, outbox_depth
from tests.harness import EMBEDDED, REAL, Process, Service, wait_until

DEADLINE_S = 90.0

Test = TypeVar("Test", bound=Callable[..., None])


@dataclass(frozen=True)
class Expected:
    """What is to become of some operations.

    :param runs: how often each one's body runs without a crash.
    """

    ids: Sequence[str]
    state: str = SUCCEEDED
    runs: int = 1

    @classmethod
    def of(cls, *results: Any, state: str = SUCCEEDED, runs: int = 1) -> Expected:
        """Of what the tasks' calls returned."""
        return cls([result.id for result in results], state, runs)


def on_embedded(points: Sequence[str]) -> Callable[[Test], Test]:
    """Tries each point on the embedded stack that the tests of a module share."""
    return _on(pytest.param(EMBEDDED), points)


def on_real(points: Sequence[str], places: Collection[str]) -> Callable[[Test], Test]:
    """Tries the points at these places on real services that the tests of a module share."""
    param = pytest.param(REAL, marks=[pytest.mark.postgresql, pytest.mark.kafka, pytest.mark.redis])
    return _on(param, [point for point in points if point.rpartition(".")[0] in places])


def _on(stack: Any, points: Sequence[str]) -> Callable[[Test], Test]:
    # One kind of stack a test: of points that come on both, pytest runs one on both before the next, and each time
    # that the kind changes it ends all processes and starts others.
    shared = pytest.mark.parametrize("module_stack", [stack], indirect=True, scope="module")
    each = pytest.mark.parametrize("point", points)
    return lambda test: each(shared(test))


def dies(process: Process, orders: Orders, point: str) -> None:
    """Waits until the process has killed itself at the point."""
    pid = wait_until(lambda: orders.died(point), DEADLINE_S, what=f"a process at {point}")
    assert process.wait(10) == -signal.SIGKILL
    assert pid == process.pid
    orders.withdraw()


def child_dies(process: Process, orders: Orders, point: str) -> None:
    """Waits until a child of the worker has killed itself at the point, and the worker has noticed."""
    pid = wait_until(lambda: orders.died(point), DEADLINE_S, what=f"a child at {point}")
    assert pid != process.pid
    told = f"pid:{pid} exited with 'signal 9 (SIGKILL)'"
    wait_until(lambda: told in process.log.read_text(), DEADLINE_S, what=f"the worker's word that {pid} was killed")
    assert process.alive
    orders.withdraw()


def ended(service: Service, expected: Expected) -> None:
    """Waits until the operations have ended as they should."""

    def all_have() -> bool:
        return all(operation(service, operation_id).state == expected.state for operation_id in expected.ids)

    wait_until(all_have, DEADLINE_S, what=f"all {expected.state}")


def check(service: Service, expected: Expected, *, limit: int | None, extra: range = range(1)) -> None:
    """Waits for the operations' ends and for quiet, and compares.

    :param limit: of their account; None: they have none.
    :param extra: how many runs there may be beyond the expected ones, of all operations together: those that the crash
        tore. No operation has more than one of them.
    """
    ended(service, expected)
    wait_until(lambda: quiet(service), DEADLINE_S, what="nothing in use, and empty outboxes")
    history = History([service])
    starts = history.starts()
    runs = {operation_id: starts[operation_id] for operation_id in expected.ids}
    assert all(expected.runs <= count <= expected.runs + 1 for count in runs.values()), runs
    assert sum(runs.values()) - expected.runs * len(runs) in extra, runs
    for operation_id in expected.ids:
        if limit is not None:
            history.check_bound(limit, account=operation(service, operation_id).account)


def quiet(service: Service) -> bool:
    """Whether no operation holds a permit, and all that either side had to say is in Kafka."""
    return not in_use(service) and not outbox_depth(service) and not holder_rows(service.stack, "outbox", "no")
