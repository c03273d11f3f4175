"""Work counted, not timed: what a pure function costs is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(function: Callable[[], object]) -> int:
    """Number of bytecode instructions that a call executes in Python; what C code does inside (a sort) is not in it."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
