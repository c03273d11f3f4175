"""Makes the faults of a plan on a running system, while its load goes on, and lets it come to rest."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from tests.chaos import history
from tests.chaos.faults import BROKERS, COMMON, PlannedFault
from tests.chaos.history import Exited, Fault, FaultOver
from tests.chaos.load import Background, Load, Witness
from tests.chaos.system import Slot, System
from tests.e2e.observe import states
from tests.harness import Process
from tests.services.process import NotReady

READY_S = 120.0
_TICK_S = 0.05

Say = Callable[[str], None]


@dataclass
class Driver:
    """One run. For the thread that started the system's processes: they end with it."""

    system: System
    plan: Sequence[PlannedFault]
    seed: int
    rate: float = 1.5
    """Operations a second and service, beside the probes."""
    say: Say = lambda _text: None
    _over: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """What ends a fault, and when (monotonic)."""
    _busy: set[str] = field(default_factory=set)
    """Targets that are frozen, and servers that are down."""
    _number: int = 0
    _postgresql_away: bool = False
    _begun_s: float = 0.0

    def __post_init__(self) -> None:
        self._rng = random.Random(f"driver {self.seed}")
        self._kinds = {**COMMON, **BROKERS[self.system.broker_kind]}

    def run(self) -> None:
        """Load and faults; returns when the last fault is over and the load has ended."""
        services = list(self.system.services.values())
        for slot in self.system.slots.values():
            slot.ensure()
        self._wait_ready()
        loads = [Load(service, self.system.history, self.seed, rate=self.rate) for service in services]
        witness = Witness(services, self.system.history, excused=lambda: self._postgresql_away)
        for load in loads:
            load.warm_up()
        if not self.settle(lambda: all(states(service)["succeeded"] for service in services), READY_S):
            raise NotReady(f"the first operations: not within {READY_S:g} s")
        self._begun_s = time.monotonic()
        threads: list[Background] = [*loads, witness]
        for thread in threads:
            thread.start()
        try:
            behind_s = 0.0
            for planned in self.plan:
                self._until(self._begun_s + planned.at_s + behind_s)
                # What took longer than planned, on a busy machine a server's start, moves the rest of the plan.
                behind_s = max(behind_s, time.monotonic() - self._begun_s - planned.at_s)
                self._make(planned)
            while self._over:
                self._until(time.monotonic() + _TICK_S)
            self._until(time.monotonic() + 1)
        finally:
            for thread in threads:
                thread.stopping.set()
            for thread in threads:
                thread.join(60)
        for load in loads:
            if load.failure is not None:
                raise load.failure

    def settle(self, at_rest: Callable[[], bool], deadline_s: float) -> bool:
        """Keeps all processes up until ``at_rest``; False if that is not so within the deadline."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if at_rest():
                return True
            self._until(time.monotonic() + 0.5)
        return False

    def _wait_ready(self) -> None:
        for slot in self.system.slots.values():
            process = slot.process
            assert process is not None
            wanted = " ready." if "dispatcher" not in slot.name and "holder" not in slot.name else "started"
            process.until(partial(_said, process, wanted), READY_S)

    def _until(self, time_s: float) -> None:
        """Waits, ends the faults that are over by then, and starts what should run and does not."""
        while True:
            now = time.monotonic()
            due = [entry for entry in self._over if entry[0] <= now]
            self._over = [entry for entry in self._over if entry[0] > now]
            for _, end in sorted(due, key=lambda entry: entry[0]):
                end()
            for slot in self.system.slots.values():
                code = slot.ensure()
                if code is not None:
                    assert slot.process is not None
                    critical = [line for line in slot.process.log_tail(500).splitlines() if "CRITICAL" in line]
                    said = critical[-1] if critical else ""
                    history.write(self.system.history, Exited(target=slot.name, code=code, said=said))
                    self.say(f"{slot.name} ended by itself with code {code}")
            if time.monotonic() >= time_s:
                return
            time.sleep(_TICK_S)

    # Faults

    def _make(self, planned: PlannedFault) -> None:
        """Makes the fault; where its target is frozen or down already, on another one, or when it is back."""
        kind = planned.kind
        while planned.target in self._busy:
            free = [target for target in self._kinds[kind].targets if target not in self._busy]
            if free:
                planned = replace(planned, target=free[0])
            else:
                self._until(time.monotonic() + _TICK_S)
        while kind == "postgresql-restart" and "holder's database" in self._busy:
            self._until(time.monotonic() + _TICK_S)
        at_s = time.monotonic() - self._begun_s
        self.say(f"{at_s:6.1f} s  {kind}: {planned.target}" + (f", {planned.lasts_s:g} s" if planned.lasts_s else ""))
        if kind == "both-holders-kill":
            self._kill([slot for name, slot in self.system.slots.items() if "holder" in name], planned)
        elif kind == "worker-child-kill":
            self._kill_child(self.system.slots[planned.target], planned)
        elif kind == "worker-child-freeze":
            self._freeze_child(self.system.slots[planned.target], planned)
        elif kind.endswith("-freeze"):
            self._freeze(self.system.slots[planned.target], planned)
        elif kind == "worker-main-kill":
            self._kill([self.system.slots[planned.target]], planned, main_only=True)
        elif planned.target in self.system.slots:
            self._kill([self.system.slots[planned.target]], planned)
        else:
            self._hit_service(planned)

    def _begin(self, planned: PlannedFault, pids: Sequence[int] = (), *, main_only: bool = False) -> int:
        self._number += 1
        fault = Fault(
            number=self._number, kind=planned.kind, target=planned.target, pids=tuple(pids), main_only=main_only
        )
        history.write(self.system.history, fault)
        return self._number

    def _end(self, number: int) -> None:
        history.write(self.system.history, FaultOver(number=number))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._over.append((time.monotonic() + seconds, action))

    def _kill(self, slots: Sequence[Slot], planned: PlannedFault, *, main_only: bool = False) -> None:
        alive = [slot for slot in slots if slot.process is not None and slot.process.alive]
        number = self._begin(planned, [pid for slot in alive for pid in slot.pids()], main_only=main_only)
        for slot in alive:
            back_at_s = time.monotonic() + planned.lasts_s
            if main_only:
                slot.kill_main(back_at_s)
            else:
                slot.kill(back_at_s)
        self._later(planned.lasts_s, lambda: self._end(number))

    def _kill_child(self, slot: Slot, planned: PlannedFault) -> None:
        child = self._child(slot)
        number = self._begin(planned, () if child is None else (child,))
        if child is not None:
            _signal(child, signal.SIGKILL)
        self._end(number)

    def _freeze_child(self, slot: Slot, planned: PlannedFault) -> None:
        child = self._child(slot)
        number = self._begin(planned, () if child is None else (child,))

        def thaw() -> None:
            if child is not None:
                _signal(child, signal.SIGCONT)
            self._end(number)

        if child is not None:
            _signal(child, signal.SIGSTOP)
        self._later(planned.lasts_s, thaw)

    def _child(self, slot: Slot) -> int | None:
        children = sorted(slot.children()) if slot.process is not None and slot.process.alive else []
        return self._rng.choice(children) if children else None

    def _freeze(self, slot: Slot, planned: PlannedFault) -> None:
        process = slot.process
        if process is None or not process.alive:
            return
        number = self._begin(planned, slot.pids())
        self._busy.add(slot.name)
        process.freeze()

        def thaw() -> None:
            process.thaw()
            self._busy.discard(slot.name)
            self._end(number)

        self._later(planned.lasts_s, thaw)

    def _hit_service(self, planned: PlannedFault) -> None:
        number, system = self._begin(planned), self.system
        if planned.kind in {"redis-flush", "rabbitmq-purge"}:
            system.forget_messages()
            self._end(number)
        elif planned.kind == "holder-database-lost":
            self._in_background(planned.target, system.lose_holder_database, number)
        elif planned.kind == "postgresql-restart":
            self._postgresql_away = True
            system.postgresql.cut_off()
            # Here and now: other faults need it.
            time.sleep(planned.lasts_s)
            system.postgresql.start()
            self._postgresql_away = False
            self._end(number)
        else:
            server = system.kafka if planned.kind == "kafka-kill" else system.broker
            self._busy.add(planned.target)
            server.kill()
            self._later(planned.lasts_s, lambda: self._in_background(planned.target, server.start, number))

    def _in_background(self, target: str, action: Callable[[], object], number: int) -> None:
        """Does what takes seconds; the target is busy until it is done, and then the fault is over."""
        self._busy.add(target)
        future = self.system.starter.submit(action)

        def look() -> None:
            if not future.done():
                self._later(_TICK_S, look)
                return
            future.result()
            self._busy.discard(target)
            self._end(number)

        self._later(_TICK_S, look)


def _said(process: Process, what: str) -> bool:
    return what in process.log_tail(1_000)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
