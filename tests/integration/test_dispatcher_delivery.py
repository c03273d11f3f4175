"""Delivery to Celery, on real databases and kombu's in-memory transport."""

from __future__ import annotations

import json
import logging
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from amqp.exceptions import ChannelError
from celery import Celery
from kombu import Exchange, Producer, Queue
from sqlalchemy import update

from celery_durable.dispatcher.delivery import BREATH_S
from celery_durable.dispatcher.publisher import BrokerUnavailable
from tests.dispatching import Service, counted_statements, noted_commits, received, steps
from tests.harness import within


@pytest.fixture
def service(database_url: str) -> Iterator[Service]:
    service = Service(database_url, sent_not_started_max=10, deliver_batch_max=8, sends_max=3)
    yield service
    service.close()


@pytest.fixture
def queue() -> str:
    """The in-memory transport is one for the process: a queue of the test's own."""
    return f"q-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def app(queue: str) -> Celery:
    return Celery("billing", broker="memory://", set_as_current=False)


def overdue(service: Service, *ids: str) -> None:
    """Their time to be sent again has come."""
    service.change(*ids, due_at=1)


def test_sends_the_message_as_celery_made_it(service: Service, app: Celery, queue: str) -> None:
    service.add(
        "op",
        account=None,
        state="admitted",
        due_at=1,
        queue=queue,
        wakes=False,
        attempt=4,
        generation=2,
        headers={"task": "t", "id": "op"},
        properties={"correlation_id": "op", "reply_to": "r"},
        publish={"priority": 3, "delivery_mode": 1, "exchange": "", "routing_key": queue},
    )
    delivery = service.delivery(app)
    steps(delivery.step)
    (message,) = received(app, queue)
    assert message.body in (b"[[], {}, {}]", "[[], {}, {}]")
    assert message.headers == {"task": "t", "id": "op", "durable_attempt": 4, "durable_generation": 2}
    assert message.properties["correlation_id"] == "op"
    assert message.properties["priority"] == 3
    assert (message.content_type, message.content_encoding) == ("application/json", "utf-8")
    row = service.row("op")
    assert (row.state, row.sends) == ("admitted", 1)
    assert row.due_at > row.enqueued_at + 4_000


def test_what_a_hint_tells_after_a_look_that_found_nothing_is_sent_at_once(
    service: Service, app: Celery, queue: str
) -> None:
    """An idle service's look must not make the call wait that comes just after it."""
    delivery = service.delivery(app)
    assert delivery.step() == float("inf")
    service.add("op", account=None, state="admitted", due_at=1, queue=queue, wakes=False)
    assert delivery.step() is None
    assert len(received(app, queue)) == 1


def test_looks_that_find_something_are_not_made_at_once_again(service: Service, app: Celery, queue: str) -> None:
    delivery = service.delivery(app)
    service.add("op", account=None, state="admitted", due_at=1, queue=queue, wakes=False)
    assert delivery.step() is None
    with counted_statements(service.database) as statements:
        pause_s = delivery.step()
    assert not statements
    assert pause_s is not None
    assert 0 < pause_s <= BREATH_S


def test_a_claim_waits_for_no_disk(postgresql: Service, app: Celery, queue: str) -> None:
    """Taken back by a crash of the server, it is due still: a second message of it is dropped (rule 8)."""
    postgresql.add("op", account=None, state="admitted", due_at=1, queue=queue, wakes=False)
    said = noted_commits(postgresql.database)
    steps(postgresql.delivery(app).step)
    assert len(received(app, queue)) == 1
    assert said == ["off"]


def test_what_a_pass_hands_over_costs_no_second_write(service: Service, app: Celery, queue: str) -> None:
    """Admission says already when to send again (design, section 6, Delivery)."""
    service.add("op", queue=queue)
    service.run_passes()
    service.lease(1)
    before = service.row("op")
    assert (before.state, before.sends) == ("admitted", 1)
    delivery = service.delivery(app)
    delivery.hand_over(service.handed)
    steps(delivery.step)
    assert len(received(app, queue)) == 1
    assert service.row("op") == before


def test_what_a_killed_dispatcher_admitted_another_one_sends(service: Service, app: Celery, queue: str) -> None:
    """B11: killed after the commit that admitted, before the message went out."""
    service.add("op", queue=queue)
    service.run_passes()
    service.lease(1)
    delivery = service.again().delivery(app)
    due_s = delivery.step()
    assert due_s is not None
    assert 4 < due_s <= 5
    overdue(service, "op")
    steps(delivery.step)
    assert len(received(app, queue)) == 1


def test_sends_again_further_and_further_apart(service: Service, app: Celery, queue: str) -> None:
    """C4: a message that the broker forgot is sent again."""
    service.add("op", account=None, state="admitted", due_at=1, queue=queue, wakes=False)
    delivery = service.delivery(app)
    delays = []
    for _ in range(3):
        overdue(service, "op")
        steps(delivery.step)
        row = service.row("op")
        delays.append(row.due_at)
    assert len(received(app, queue)) == 3
    gaps = [round((due - service.row("op").enqueued_at) / 1000) for due in delays]
    assert [abs(gap - wanted) <= 2 for gap, wanted in zip(gaps, (5, 10, 20), strict=True)] == [True] * 3


def test_an_operation_that_nobody_starts_gives_its_permit_back(
    service: Service, app: Celery, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C22: after sends_max sends without a start it waits without a permit, longer each time, with a warning."""
    service.add("op", queue=queue, wakes=False, state="admitted", sends=3, due_at=1, admitted_at=1)
    woken: list[bool] = []
    delivery = service.delivery(app, on_wakes=lambda: woken.append(True))
    with caplog.at_level(logging.WARNING):
        steps(delivery.step)
    row = service.row("op")
    assert (row.state, row.admitted_at) == ("scheduled", None)
    assert 200_000 < row.due_at - row.enqueued_at < 400_000
    assert received(app, queue) == []
    assert service.count("wakes") == 1
    assert woken == [True]
    assert f"queue {queue!r} 3 times" in caplog.text
    service.change("op", state="admitted", due_at=1)
    steps(delivery.step)
    assert len(received(app, queue)) == 1
    service.change("op", due_at=1)
    steps(delivery.step)
    service.change("op", due_at=1)
    steps(delivery.step)
    later = service.row("op")
    assert later.state == "scheduled"
    assert later.due_at - row.due_at > 200_000


def test_a_queue_holds_no_more_than_its_cap_unstarted_and_hides_no_other(
    service: Service, app: Celery, queue: str
) -> None:
    """At most sent_not_started_max per Celery queue; a full one does not hold back another (case A10's like)."""
    other = queue + "-other"
    service.add(*(f"a{n}" for n in range(40)), account=None, state="admitted", due_at=1, queue=queue, wakes=False)
    service.add("b", account=None, state="admitted", due_at=2, queue=other, wakes=False)
    delivery = service.delivery(app)
    steps(delivery.step)
    assert len(received(app, queue)) == 10
    assert len(received(app, other)) == 1
    overdue(service, *(f"a{n}" for n in range(5)))
    steps(delivery.step)
    again = received(app, queue)
    assert len(again) == 5, "those sent before are sent again, none beyond the cap"
    service.change("a0", "a1", state="running", run_token="r")
    steps(delivery.step)
    assert len(received(app, queue)) == 2


def test_what_is_handed_over_beyond_the_cap_waits_in_sql(service: Service, app: Celery, queue: str) -> None:
    service.add(*(f"a{n}" for n in range(14)), queue=queue)
    service.run_passes()
    service.lease(14)
    delivery = service.delivery(app)
    delivery.hand_over(service.handed)
    steps(delivery.step)
    assert len(received(app, queue)) == 10
    assert sorted(service.row(f"a{n}").sends for n in range(14)) == [0] * 4 + [1] * 10


def test_a_message_that_cannot_be_sent_fails_alone(
    service: Service, app: Celery, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B13."""
    common = {"account": None, "state": "admitted", "due_at": 1, "queue": queue, "wakes": False}
    service.add("a", **common)
    service.add("poison", publish={"compression": "no-such-compression"}, **common)
    service.add("z", **common)
    delivery = service.delivery(app)
    with caplog.at_level(logging.WARNING):
        steps(delivery.step)
    assert len(received(app, queue)) == 2
    assert "operation poison cannot be sent" in caplog.text
    assert service.row("poison").sends == 1


@pytest.mark.redis
def test_redis_takes_a_batch_in_one_round_trip(
    sqlite_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(sqlite_url)
    app = Celery("billing", broker=redis_url, set_as_current=False)
    ids = [f"a{number}" for number in range(50)]
    service.add(*ids, account=None, state="admitted", due_at=1, queue="celery", wakes=False)
    pushed: list[int] = []
    execute = redis.client.Pipeline.execute

    def counted(pipeline: Any, *args: Any, **options: Any) -> Any:
        pushed.append(sum(command[0][0].upper() == "LPUSH" for command in pipeline.command_stack))
        return execute(pipeline, *args, **options)

    monkeypatch.setattr(redis.client.Pipeline, "execute", counted)
    delivery = service.delivery(app)
    steps(delivery.step)
    delivery.close()
    assert [count for count in pushed if count] == [50]
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("celery") == 50
    service.close()


@pytest.mark.redis
def test_what_redis_refuses_fails_alone(sqlite_url: str, redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """B13: the whole batch is uncertain then, so each goes once more: some twice, of which a worker starts one."""
    service = Service(sqlite_url)
    app = Celery("billing", broker=redis_url, set_as_current=False)
    delivery = service.delivery(app)

    def add(name: str, queue: str) -> None:
        publish, headers = {"exchange": "", "routing_key": queue}, {"id": name}
        columns = {"account": None, "state": "admitted", "due_at": 1, "wakes": False}
        service.add(name, queue=queue, publish=publish, headers=headers, **columns)

    with redis.Redis.from_url(redis_url) as client:
        add("first", "taken")
        steps(delivery.step)
        client.set("taken", "no list")
        for name, queue in (("a", "celery"), ("poison", "taken"), ("z", "celery")):
            add(name, queue)
        with caplog.at_level(logging.WARNING):
            steps(delivery.step)
        delivery.close()
        ids = {json.loads(message)["headers"]["id"] for message in client.lrange("celery", 0, -1)}
    assert ids == {"a", "z"}
    assert "operation poison cannot be sent to queue 'taken': ResponseError: " in caplog.text
    assert "WRONGTYPE" in caplog.text
    assert caplog.text.count("cannot be sent") == 1
    service.close()


def test_what_was_cancelled_meanwhile_is_not_sent(service: Service, app: Celery, queue: str) -> None:
    service.add("op", queue=queue)
    service.run_passes()
    service.lease(1)
    service.change("op", state="cancelled", ended_at="now")
    delivery = service.delivery(app)
    delivery.hand_over(service.handed)
    steps(delivery.step)
    assert received(app, queue) == []


def test_two_dispatchers_send_each_operation_once(service: Service, app: Celery, queue: str) -> None:
    ids = [f"a{n}" for n in range(10)]
    service.add(*ids, account=None, state="admitted", due_at=1, queue=queue, wakes=False)
    first, second = service.delivery(app), service.again().delivery(app)
    while first.step() is None or second.step() is None:
        pass
    assert len(received(app, queue)) == 10
    assert {service.row(one).sends for one in ids} == {1}


@pytest.mark.postgresql
def test_a_due_row_that_someone_holds_is_left_without_spinning(postgresql_url: str, app: Celery, queue: str) -> None:
    """A cancel that is not committed yet."""
    service = Service(postgresql_url)
    service.add("held", account=None, state="admitted", due_at=1, queue=queue, wakes=False)
    operations = service.tables.operations
    with service.database.transaction() as connection:
        connection.execute(update(operations).where(operations.c.id == "held").values(state="cancelled"))
        assert service.again().delivery(app).step() == float("inf")
    assert received(app, queue) == []
    service.close()


@pytest.mark.postgresql
def test_who_holds_what_is_put_back_stalls_no_delivery(postgresql_url: str, app: Celery, queue: str) -> None:
    """A36: a cancel that is not committed yet, of an operation for which its Celery queue has no room."""
    service = Service(postgresql_url, sent_not_started_max=1)
    service.add("first", "held", "last", queue=queue)
    service.run_passes()
    service.lease(3)
    other = service.again()
    delivery = other.delivery(app)
    delivery.hand_over(service.handed)
    operations = service.tables.operations
    with ThreadPoolExecutor(1) as pool, service.database.transaction() as connection:
        connection.execute(update(operations).where(operations.c.id == "held").values(state="cancelled"))
        pool.submit(delivery.step).result(10)
        pool.submit(other.database.drop_held).result(10)
        assert len(received(app, queue)) == 1
    assert [service.row(one).sends for one in ("first", "held", "last")] == [1, 1, 0]
    service.close()


def test_an_exchange_of_the_callers_own_gets_no_queue_that_nobody_reads(
    service: Service, app: Celery, queue: str
) -> None:
    """``exchange=`` and ``routing_key=`` of the call name no queue: who reads it has declared and bound its own."""
    key = f"key-{queue}"
    publish = {"exchange": f"exchange-{queue}", "routing_key": key}
    service.add("op", account=None, state="admitted", due_at=1, queue=key, wakes=False, publish=publish)
    with app.connection_for_read() as connection:
        bound = Queue(queue, Exchange(publish["exchange"]), routing_key=key)(connection.default_channel)
        bound.declare()
        delivery = service.delivery(app)
        steps(delivery.step)
        assert bound.get(no_ack=True) is not None
        with pytest.raises(ChannelError):
            Queue(key)(connection.default_channel).queue_declare(passive=True)


def test_a_broker_that_refuses_costs_no_send(service: Service, queue: str) -> None:
    """C19: with the broker down nothing is lost or counted; delivery follows."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    down = Celery("billing", broker=f"redis://127.0.0.1:{port}/0", set_as_current=False)
    service.add("op", account=None, state="admitted", due_at=1, queue=queue, wakes=False)
    delivery = service.delivery(down)
    with pytest.raises(BrokerUnavailable):
        delivery.step()
    row = service.row("op")
    assert (row.sends, row.due_at) == (0, 1)
    delivery.close()


def test_a_broker_that_goes_away_in_a_batch_costs_the_rest_no_send(
    service: Service, app: Celery, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4, C19: not the messages' fault, so none is counted, and all go when it is back."""
    service.add("one", "two", "three", account=None, state="admitted", due_at=1, queue=queue, wakes=False)
    delivery = service.delivery(app)
    publish = Producer.publish
    sent: list[str] = []

    def publish_one_then_die(self: Producer, *args: object, **options: object) -> object:
        if sent:
            raise ConnectionResetError("the broker went away")
        sent.append("one")
        return publish(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Producer, "publish", publish_one_then_die)
        with pytest.raises(BrokerUnavailable):
            delivery.step()
    assert [service.row(name).sends for name in ("one", "two", "three")] == [1, 0, 0]
    steps(delivery.step)
    assert len(received(app, queue)) == 3


def test_a_broker_that_hangs_is_left_at_the_deadline(service: Service, queue: str) -> None:
    """A broker that accepts connections and never answers: the step ends, and what was handed over is not lost."""
    with socket.create_server(("127.0.0.1", 0)) as hung:
        broker = f"redis://127.0.0.1:{hung.getsockname()[1]}/0"
        service = service.again(publish_deadline_s=0.3)
        app = Celery("billing", broker=broker, set_as_current=False)
        service.add("op", account=None, state="admitted", due_at=1, queue=queue, wakes=False)
        delivery = service.delivery(app)
        with within(30, "the end of the step, though the broker never answers"), pytest.raises(BrokerUnavailable):
            delivery.step()
        delivery.close()
    row = service.row("op")
    assert (row.state, row.sends) == ("admitted", 0)
    service.close()
