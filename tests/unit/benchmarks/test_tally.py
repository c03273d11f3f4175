"""The counter of bodies, over threads and forks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from benchmarks.setting.tally import Tally


def test_threads_and_forked_processes_add_up(tmp_path: Path) -> None:
    tally = Tally(tmp_path / "tally")

    def run_bodies() -> None:
        for _ in range(500):
            tally.ran()

    threads = [threading.Thread(target=run_bodies) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            run_bodies()
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert tally.count == Tally(tmp_path / "tally").count == 3_500


def test_the_last_body_tells_its_delay(tmp_path: Path) -> None:
    tally = Tally(tmp_path / "tally")
    started_ns = tally.began()
    tally.ran(sent_ns=started_ns - 5, started_ns=started_ns)
    assert tally.started_ns == started_ns
    assert tally.ended_ns >= started_ns
    assert tally.delay_ns == 5
    tally.flag = 3
    assert Tally(tmp_path / "tally").flag == 3
