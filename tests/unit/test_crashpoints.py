"""No commit, publish or acknowledgement of production code is outside a crash point, and none is misspelled.

Told by the code's syntax. ``tests/crashing`` crashes at every name of the list.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from celery_durable import crashpoints
from celery_durable.crashpoints import ACKNOWLEDGEMENTS, COMMITS, POINTS, PUBLISHES, Hook, arm, crashpoint
from celery_durable.store.database import Database

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("celery_durable", "holder_service")
PURE = ("allocation.py", "footprint.py", "intake.py", "semaphore.py")
"""The holder's decisions: import-linter keeps SQL and Kafka from them."""

PLACED = {
    "crashpoint": 0,
    "transaction": 0,
    "one_write": 0,
    "alone": 0,  # one or the other of these
    "transactions.transaction": 1,
    "self._transaction": 0,
    "self._move": 1,
    "self._settle": 0,
    "self._in_steps": 0,
}
"""Calls that are given a place, and as which argument. Those of ``self`` hand theirs on, and are looked at for it."""
HANDS_ON = {
    "dispatcher/recovery.py": {"self._move"},
    "holder_service/rebuild.py": {"self._transaction"},
    "store/attempts.py": {"self._settle", "self._in_steps"},
}

AUTOCOMMIT = {
    "control.py status": "a call that reads",
    "dispatcher/delivery.py Delivery.step": "what is due, by queue",
    "dispatcher/delivery.py Delivery._send": "the messages of what was claimed",
    "dispatcher/main.py Dispatcher._look": "the watch's one statement",
    "dispatcher/passes.py Passes.step": "which accounts need a pass",
    "dispatcher/recovery.py Recovery.step": "when the next is due",
    "dispatcher/telling.py Telling.step": "when a mark is due",
    "dispatcher/telling.py Telling._tell_all": "what was claimed",
    "dispatcher/replies.py ReplyReader._load": "the stored offsets",
    "kafka/relay.py Relay._is_due": "when the next row is due",
    "monitoring/events.py Events.step": "rows that changed",
    "monitoring/events.py Events._busy": "which workers run something",
    "monitoring/inspect.py ps": "a command that shows",
    "monitoring/inspect.py why": "a command that shows",
    "monitoring/inspect.py accounts": "a command that shows",
    "results.py DurableBackend.read": "an operation",
    "results.py DurableBackend._committed_state": "the state of an operation",
    "store/attempts.py Attempts._one": "a read, or a statement between its caller's crash points",
    "store/attempts.py Attempts._in_steps": "a transaction with its crash points",
    "store/bell.py Bell.ring": "rings, after a commit",
    "store/bell.py Listener.wait": "listens",
    "store/database.py Database.one_write": "between its crash points",
    "store/migrate.py check": "the revision",
    "transactions.py reading": "its caller is on this list",
    "worker/boot.py _check": "whose tables they are",
    "holder_service/commands.py usages": "a command that shows",
    "holder_service/commands.py go": "which accounts wait",
    "holder_service/rebuild.py Rebuilder.enter": "the database's row",
    "holder_service/rebuild.py _Run._sweep": "the accounts, beside the transactions that write them",
    "holder_service/service.py Service._load_positions": "the stored offsets",
    "holder_service/service.py Service._run_timers": "which timers are over",
}
"""Every use of a connection in autocommit: what it reads, or where its crash points are."""

SENDS = {
    "dispatcher/publisher.py Publisher.publish self._publish_each": "delivery.message publish",
    "dispatcher/publisher.py Publisher.publish self._publish_together": "delivery.message publish",
    "kafka/consumer.py PartitionReader.commit session.consumer.commit": "reader.offset acknowledge",
    "kafka/relay.py Relay._produce produce": "relay.message publish",
    "kafka/relay.py Relay._on_delivery self._sent.append": "relay.message acknowledge",
    "monitoring/event_broker.py EventBroker._publish self._dispatcher.send": "events.message publish",
    "worker/backend.py SettlingBackend._forward forward": "worker.outcome publish",
    "worker/request.py DurableRequest.acknowledge super().acknowledge": "worker.message acknowledge",
    "worker/request.py DurableRequest.reject super().reject": "worker.message acknowledge",
}
"""Each call that publishes or acknowledges, and which crash points it is between."""

HARMLESS = {
    "collected.py Collected._before_commit connection.connection.rollback": "in place of a commit that failed",
    "targets.py accept_async target.begin": "the caller's, who commits",
    "dispatcher/delivery.py Delivery._send self._publisher.publish": "it has the crash points",
    "dispatcher/publisher.py Publisher._send self._producer.publish": "called between the crash points",
    "dispatcher/replies.py ReplyReader.step self._reader.commit": "it has the crash points",
    "holder_service/service.py Service._consume reader.commit": "it has the crash points",
    "holder_service/rebuild.py Rebuilder._begin life.begin": "a statement of a transaction",
    "kafka/relay.py Relay._produce.produce producer.produce": "called between the crash points",
    "kafka/topics.py _create admin.create_topics": "an operator's command, which compares: it may be run again",
    "message.py capture send": "its producer only records",
    "monitoring/events.py Events._say self._broker.send": "it has the crash points",
    "monitoring/events.py Events._announce_ends self._broker.send": "it has the crash points",
    "results.py DurableAsyncResult.revoke super().revoke": "a hint to workers: the row says it too",
    "store/database.py Database.transaction self.engine.begin": "between the crash points of all transactions",
    "task.py DurableTask.apply_async super().apply_async": "an eager call, which sends nothing",
    "task.py DurableTask._apply_call self.apply_async": "it enqueues",
    "worker/request.py DurableRequest._settle attempts.revoke": "a commit with its crash points",
    "worker/request.py DurableRequest._report_success self.acknowledge": "it has the crash points",
    "worker/request.py DurableRequest._report_retry self.acknowledge": "it has the crash points",
    "worker/request.py DurableRequest._report_cancelled self.acknowledge": "it has the crash points",
    "worker/request.py DurableRequest._report_failure self.acknowledge": "it has the crash points",
    "worker/request.py DurableRequest._report_retry signals.task_retry.send": "Celery's signal, no message",
    "worker/request.py DurableRequest._report_cancelled signals.task_revoked.send": "Celery's signal, no message",
}
"""Calls of the same names that need no crash point, and why."""

SUSPICIOUS = frozenset(
    (
        *("ack", "acknowledge", "apply_async", "begin", "broadcast", "commit", "create_topics", "forward", "produce"),
        *("publish", "reject", "revoke", "rollback", "send", "send_task"),
    )
)
"""How the libraries' functions are called that commit, publish or acknowledge."""


@dataclass(frozen=True)
class Call:
    """A call in production code. ``where``: file and function. ``name``: what is called, as it is written."""

    where: str
    name: str
    node: ast.Call

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    def text(self, position: int) -> str | None:
        """An argument, if it is a text."""
        argument = self.node.args[position] if len(self.node.args) > position else None
        return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None


@cache
def calls() -> tuple[Call, ...]:
    """All calls of both packages; not of migrations, which run in a transaction of their caller's."""
    found: list[Call] = []
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            if path.name not in ("crashpoints.py", *PURE) and "versions" not in path.parts:
                file = path.relative_to(REPOSITORY).as_posix().removeprefix("celery_durable/")
                found += _calls(ast.parse(path.read_text(encoding="utf-8")), file, "")
    return tuple(found)


def _calls(node: ast.AST, file: str, inside: str) -> Iterator[Call]:
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{child.name}" if inside else child.name
        if isinstance(child, ast.Call):
            yield Call(f"{file} {inside}", ast.unparse(child.func), child)
        yield from _calls(child, file, name)


def placed() -> Iterator[tuple[Call, str | None]]:
    """Each call that is given a place, with that place; None: it is a variable."""
    for call in calls():
        file = call.where.partition(" ")[0]
        known = call.name if not call.name.startswith("self.") or call.name in HANDS_ON.get(file, ()) else call.last
        position = PLACED.get(known, PLACED.get(call.last) if call.last in ("transaction", "one_write") else None)
        if position is not None:
            yield call, call.text(position)


def crashes(where: str) -> dict[str, int]:
    """The lines of a function's own crash points, by moment; of several the outermost."""
    lines: dict[str, int] = {}
    for call in calls():
        moment = call.text(1)
        if call.where == where and call.name == "crashpoint" and moment is not None:
            outermost = min if moment.startswith("before") else max
            lines[moment] = outermost(lines.get(moment, call.node.lineno), call.node.lineno)
    return lines


def test_every_place_is_on_the_list() -> None:
    """Every transaction and every writing statement names a place of the list, as a text or as its caller's."""
    places = {*COMMITS, *PUBLISHES, *ACKNOWLEDGEMENTS}
    for call, place in placed():
        named = place in places or (place is None and "place" in ast.unparse(call.node))
        assert named, f"{call.where}: {ast.unparse(call.node)[:80]} names no place of celery_durable.crashpoints"


def test_every_point_is_in_the_code() -> None:
    """The list has no name twice, and none that nothing passes."""
    assert len(set(POINTS)) == len(POINTS)
    passed: set[str] = set()
    for call, place in placed():
        if call.name != "crashpoint":
            passed |= {f"{place}.before_commit", f"{place}.after_commit"}
        else:
            passed.add(f"{place}.{call.text(1)}")
    assert passed >= set(POINTS)


def test_only_database_opens_connections() -> None:
    """Nothing commits past the transactions and connections that :class:`Database` gives out."""
    found = {call.where for call in calls() if call.name.endswith(("engine.begin", "engine.connect"))}
    assert found == {f"store/database.py Database.{name}" for name in ("transaction", "reading", "held")}


def test_autocommit_only_reads_or_is_crashed() -> None:
    """A statement in autocommit is a commit: whoever has such a connection is on the list, with what for."""
    found = {
        call.where for call in calls() if call.last in ("reading", "autocommit") or call.name.endswith("database.held")
    }
    assert found == set(AUTOCOMMIT)


@pytest.mark.parametrize("function", ["start", "beat", "_settle"])
def test_a_worker_s_statements_are_crashed(function: str) -> None:
    """The hot path's own statements go past SQLAlchemy: each is between its crash points."""
    where = f"store/attempts.py Attempts.{function}"
    lines = [call.node.lineno for call in calls() if call.where == where and call.last in ("_one", "_in_steps")]
    moments = crashes(where)
    assert moments["before_commit"] < max(lines) < moments["after_commit"]


def test_a_worker_s_transaction_is_crashed() -> None:
    """The same of the one on SQLite, whose ``COMMIT`` is a statement."""
    where = "store/attempts.py Attempts._in_steps"
    commits = [call.node.lineno for call in calls() if call.where == where and call.text(0) == "COMMIT"]
    assert len(commits) == 1
    assert crashes(where)["before_commit"] < commits[0]
    others = [call.where for call in calls() if call.text(0) == "COMMIT" and call.where != where]
    assert not others


def test_all_that_is_sent_is_crashed() -> None:
    """Each publish and each acknowledgement is between the crash points that belong to it."""
    names = {f"{call.where} {call.name}" for call in calls()}
    for sent, crashed in SENDS.items():
        assert sent in names, sent
        where, _, name = sent.rpartition(" ")
        place, what = crashed.split()
        moments = crashes(where)
        for call in calls():
            if (call.where, call.name) == (where, name):
                assert moments[f"before_{what}"] < call.node.lineno < moments[f"after_{what}"], sent
        assert {place for call, place in placed() if call.where == where and call.name == "crashpoint"} == {place}


def test_nothing_else_is_sent() -> None:
    """Whatever looks like a commit, a publish or an acknowledgement is crashed, or has a reason not to be."""
    found = {f"{call.where} {call.name}" for call in calls() if call.last in SUSPICIOUS}
    assert found - set(SENDS) - set(HARMLESS) == set()
    assert set(HARMLESS) - found == set()


def test_a_hook_sees_both_sides_of_a_commit(tmp_path: Path) -> None:
    """Before the commit it can still roll back; after it, the caller cannot know that it happened."""
    database = Database(f"sqlite:///{tmp_path / 'one.sqlite3'}")
    with database.transaction("migrate.upgrade") as connection:
        connection.exec_driver_sql("CREATE TABLE seen (point TEXT)")
    passed: list[str] = []

    def raising_at(stop_at: str) -> Hook:
        def hook(point: str) -> None:
            passed.append(point)
            if point == stop_at:
                raise OSError(point)

        return hook

    def rows() -> int:
        with database.reading() as connection:
            return int(connection.exec_driver_sql("SELECT count(*) FROM seen").scalar_one())

    try:
        for moment, left in (("before_commit", 0), ("after_commit", 1)):
            arm(raising_at(f"passes.step.{moment}"))
            with pytest.raises(OSError, match="passes"), database.transaction("passes.step") as connection:
                connection.exec_driver_sql("INSERT INTO seen VALUES ('one')")
            assert rows() == left
        arm(raising_at("enqueue.one.after_commit"))
        with pytest.raises(OSError, match="enqueue"), database.one_write("enqueue.one") as connection:
            connection.exec_driver_sql("INSERT INTO seen VALUES ('two')")
        assert rows() == 2
    finally:
        arm(None)
        database.dispose()
    assert passed == [
        *("passes.step.before_commit", "passes.step.before_commit", "passes.step.after_commit"),
        *("enqueue.one.before_commit", "enqueue.one.after_commit"),
    ]


def test_unarmed_does_nothing() -> None:
    """No name is made, and nothing is called."""
    assert crashpoints._hook is None
    crashpoint("passes.step", "before_commit")
