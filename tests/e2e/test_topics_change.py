"""Topics that change under running services: made anew, trimmed, and with more partitions, on Apache Kafka."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic  # type: ignore[attr-defined]

from celery_durable.runtime import runtime_of
from tests.e2e.observe import History, holder_rows, in_use, operation, rows, states, wait_ended
from tests.harness import Process, Service, Stack, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.postgresql, pytest.mark.kafka, pytest.mark.timeout(400)]

DEADLINE_S = 90.0
SESSION_MS = 2_000
LIMIT = 2


class Topics:
    """The operator of the stack's topics."""

    def __init__(self, service: Service) -> None:
        settings = runtime_of(service.app).settings
        self.accounts = settings.accounts_topic
        self.replies = settings.replies_topic(service.name)
        self._admin = AdminClient({"bootstrap.servers": service.stack.kafka.bootstrap_servers})

    def partitions(self, topic: str) -> int:
        """How many the topic has; 0: there is no such topic."""
        known = self._admin.list_topics(timeout=10).topics
        return len(known[topic].partitions) if topic in known else 0

    def make_anew(self, *topics: str) -> None:
        """Deletes topics with all messages, and creates them again."""
        counts = {topic: self.partitions(topic) for topic in topics}
        for future in self._admin.delete_topics(list(topics)).values():
            future.result(30)
        wait_until(lambda: not any(map(self.partitions, topics)), DEADLINE_S, what="the topics are gone")
        for future in self._admin.create_topics(
            [NewTopic(name, number, 1) for name, number in counts.items()]
        ).values():
            future.result(30)
        self._wait_for(counts)

    def trim(self, topic: str) -> None:
        """Retention takes all messages."""
        everything = [TopicPartition(topic, number, -1) for number in range(self.partitions(topic))]
        for future in self._admin.delete_records(everything).values():
            future.result(30)

    def grow(self, topic: str, partitions: int) -> None:
        """Raises the number of partitions."""
        for future in self._admin.create_partitions([NewPartitions(topic, partitions)]).values():
            future.result(30)
        self._wait_for({topic: partitions})

    def _wait_for(self, counts: Mapping[str, int]) -> None:
        wait_until(
            lambda: {topic: self.partitions(topic) for topic in counts} == counts, DEADLINE_S, what=f"topics {counts}"
        )


def started(stack: Stack) -> tuple[Service, Process]:
    """A service at work, with a permit in use that lasts until there is a file ``go``, and its holder."""
    service = stack.service(idle_return_s=300.0)
    holder = stack.holder(kafka_session_timeout_ms=SESSION_MS)
    service.dispatcher()
    service.worker(concurrency=4)
    held = service.task("until").delay("tenant:held", str(service.folder / "go"))
    wait_until(lambda: operation(service, held.id).state == "running", DEADLINE_S, what="it runs")
    return service, holder


def works(service: Service, name: str, accounts: int = 8, each: int = 3) -> None:
    """Operations of some new accounts, and of the one whose permit is in use, all succeed."""
    for number in range(accounts):
        service.task("work").enqueue_many([(f"{name}:{number}",)] * each)
    late = service.task("work").delay("tenant:held")
    for number in range(accounts):
        wait_ended(service, f"{name}:{number}", each, DEADLINE_S)
    assert late.get(timeout=DEADLINE_S) == "tenant:held"


def ends_well(service: Service) -> None:
    """What was held ends; nothing ran above its limit or twice, and nothing stays in use."""
    assert states(service, "tenant:held")["running"] == 1
    (service.folder / "go").touch()
    wait_until(lambda: not in_use(service), DEADLINE_S, what="nothing in use")
    history = History([service])
    history.check_bound(LIMIT)
    assert set(history.starts().values()) == {1}


def test_topics_that_are_lost_are_noticed_and_read_from_their_start(real_stack: Stack) -> None:
    """Case B8: accounts and replies deleted and made anew under running processes; then trimmed while no holder ran."""
    service, holder = started(real_stack)
    topics = Topics(service)
    works(service, "before")
    topics.make_anew(topics.accounts, topics.replies)
    works(service, "anew")
    dispatcher_log = service.folder / f"{service.name}-dispatcher2.log"
    for log, topic in ((holder.log, topics.accounts), (dispatcher_log, topics.replies)):
        said = re.compile(rf"{re.escape(topic)} \[\d+\]: the topic was recreated or cut")
        wait_until(
            lambda log=log, said=said: said.search(log.read_text()), DEADLINE_S, what=f"word of {topic} in {log}"
        )  # type: ignore[misc]

    holder.kill()
    unread = {f"unread:{number}" for number in range(8)}
    service.task("work").enqueue_many([(name,) for name in sorted(unread)])
    wait_until(lambda: unread <= {name for (name,) in rows(service, "accounts", "account")}, DEADLINE_S, what="passes")
    wait_until(lambda: not rows(service, "outbox", "no"), DEADLINE_S, what="the reports are sent")
    topics.trim(topics.accounts)
    holder = real_stack.holder(kafka_session_timeout_ms=SESSION_MS)
    for name in sorted(unread):
        wait_ended(service, name, 1, DEADLINE_S)
    told = "messages were trimmed before they were read"
    wait_until(lambda: told in holder.log.read_text(), DEADLINE_S, what="the holder's word that messages are gone")
    works(service, "after")
    ends_well(service)


def test_more_partitions_move_accounts_and_keep_the_bound(real_stack: Stack) -> None:
    """Case B10: raised under load, with two holders; accounts go to partitions that are new, their rows with them."""
    service, _holder = started(real_stack)
    real_stack.holder(kafka_session_timeout_ms=SESSION_MS)
    topics = Topics(service)
    before = topics.partitions(topics.accounts)
    names = [f"move:{number}" for number in range(24)]
    for name in names:
        service.task("work").enqueue_many([(name, 0.1)] * 10)
    wait_until(lambda: states(service)["succeeded"] > 40, DEADLINE_S, what="the load moves")
    topics.grow(topics.accounts, before + 5)
    works(service, "grown")
    for name in names:
        wait_ended(service, name, 10, DEADLINE_S)

    numbers = itertools.count()

    def moved() -> bool:
        # Producers learn of new partitions when they look next: the load may have ended before.
        works(service, f"moved:{next(numbers)}")
        read = holder_rows(real_stack, "offsets", "topic", "partition")
        return any(topic == topics.accounts and number >= before for topic, number in read)

    wait_until(moved, DEADLINE_S, what="accounts in the new partitions")
    ends_well(service)


def test_two_dispatchers_of_which_one_is_killed_again_and_again(real_stack: Stack) -> None:
    """Case B11: two on one database, SIGKILL at any moment: nothing is claimed twice, and no wake is lost."""
    service = real_stack.service(resend_min_s=1.0)
    real_stack.holder(kafka_session_timeout_ms=SESSION_MS)
    dispatchers = [service.dispatcher(), service.dispatcher()]
    service.worker(concurrency=4)
    total, kills = 0, 0
    for turn in range(6):
        for number in range(6):
            service.task("work").enqueue_many([(f"tenant:{number}", 0.01)] * 6)
            total += 6
        wait_until(lambda turn=turn: states(service)["succeeded"] >= 36 * turn + 12, DEADLINE_S, what="some are done")  # type: ignore[misc]
        dispatchers.pop(0).kill()
        kills += 1
        dispatchers.append(service.dispatcher())
    wait_until(lambda: states(service) == {"succeeded": total}, DEADLINE_S, what=f"all done after {kills} kills")
    history = History([service])
    history.check_bound(LIMIT)
    assert set(history.starts().values()) == {1}
    assert not rows(service, "attempts", "operation_id")
    wait_until(lambda: not rows(service, "wakes", "no"), DEADLINE_S, what="no wake is left")
