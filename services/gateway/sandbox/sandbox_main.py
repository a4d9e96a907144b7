"""`python -m services.gateway.sandbox.sandbox_main` does what may kill a process, or never end.

Reads one JSON object a line and answers each with a line:

    {"kind", "source"}           compiles a constraint      {"problem": text or null}
    {"template", "variables"}    renders a chat template    {"text"} or {"problem": text}

Ends when its stdin is closed. It has less stack than the threads of the workers, and limits on memory and time: a
constraint that it survives does no harm there.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

from halfmoon.engine.constraint import check_constraint
from halfmoon.engine.request import Constraint
from halfmoon.engine.text.chat_template import ChatTemplate
from halfmoon.errors import InvalidRequest

_STACK_BYTES = 4 << 20  # a quarter of what an engine's thread has
_MORE_MEMORY_BYTES = 192 << 20  # than at the start; workers keep dozens of compiled constraints
_CPU_S = 1  # for one line; up to one more, as the limit is in whole seconds
_MOST_TEXT_CHARS = 4 << 20  # as JSON at most 12 bytes each
_MOST_PROBLEM_CHARS = 2_000  # a compiler's message may repeat the whole source
_NICE = 5  # below the priority of workers on the same host


def main() -> None:
    """Answers until stdin is closed."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_answer_lines, daemon=True)
    thread.start()
    thread.join()


def _answer_lines() -> None:
    _problem({"kind": "regex", "source": "a"})  # what is loaded once does not count
    _limit(resource.RLIMIT_AS, _address_space_bytes() + _MORE_MEMORY_BYTES)
    for line in sys.stdin:
        _limit(resource.RLIMIT_CPU, math.ceil(_cpu_s()) + _CPU_S)
        sys.stdout.write(json.dumps(_answer(json.loads(line))) + "\n")
        sys.stdout.flush()


def _answer(question: dict[str, Any]) -> dict[str, str | None]:
    return _rendered(**question) if "template" in question else {"problem": _problem(question)}


def _rendered(template: str, variables: dict[str, Any]) -> dict[str, str | None]:
    try:
        text = ChatTemplate(template).render(variables)
    except InvalidRequest as error:
        return {"problem": error.message[:_MOST_PROBLEM_CHARS]}
    if len(text) > _MOST_TEXT_CHARS:
        return {"problem": f"it writes {len(text)} characters, more than {_MOST_TEXT_CHARS}"}
    return {"text": text}


def _problem(fields: dict[str, str]) -> str | None:
    try:
        check_constraint(Constraint(fields["kind"], fields["source"]))  # type: ignore[arg-type]
    except InvalidRequest as error:
        return error.message[:_MOST_PROBLEM_CHARS]
    return None


def _limit(which: int, soft: int) -> None:
    resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
