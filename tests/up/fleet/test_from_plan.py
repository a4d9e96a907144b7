"""Workers of a plan as they are started, on one host or several."""

from __future__ import annotations

import pytest

from halfmoon.plan.plan_file import PlannedLayout
from halfmoon.up.fleet.from_plan import with_planned_workers
from halfmoon.up.up_options import UpOptions, WorkerStart

PLANNED = PlannedLayout.model_validate(
    {
        "workers": [
            {"role": "prefill", "gpu": "h200", "tp": 2, "first_node": 1},
            {"role": "decode", "gpu": "a100-80g", "count": 2},
        ]
    }
)
PAIRED = ("--tensor-parallel", "2", "--pipeline-parallel", "1", "--unit", "unit-1")
PLAIN = ("--tensor-parallel", "1", "--pipeline-parallel", "1")


@pytest.mark.parametrize(
    ("on", "prefill", "decode"),
    [
        ("this-host", WorkerStart(PAIRED, 2, gpu="h200"), WorkerStart(PLAIN, 1, gpu="a100-80g")),
        ("ray", WorkerStart(PAIRED, 2, unit="unit-1", gpu="h200"), WorkerStart(PLAIN, 1, gpu="a100-80g")),
    ],
)
def test_kinds_of_gpu_count_everywhere_and_hosts_where_there_are_several(
    on: str, prefill: WorkerStart, decode: WorkerStart
) -> None:
    options = with_planned_workers(UpOptions(on=on), PLANNED)  # type: ignore[arg-type]
    assert (options.num_prefill, options.num_decode, options.num_both) == (1, 2, 0)
    assert (options.worker_starts["prefill"], options.worker_starts["decode"]) == ([prefill], [decode, decode])
