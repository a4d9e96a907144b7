"""What `halfmoon up` starts for which options."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.up import PreparedModel, UpOptions, _other_specs, gateway_spec

MODEL = PreparedModel("/models/m", "m")


def names(options: UpOptions) -> list[str]:
    return [spec.name for spec in _other_specs(options, MODEL, "127.0.0.1:7000")]


def test_one_process_a_worker() -> None:
    options = UpOptions(num_prefill=2, num_decode=1, num_both=1, console=False)
    assert names(options) == ["kvstore", "planner", "prefill-0", "prefill-1", "decode-0", "both-0"]


@pytest.mark.parametrize(("num_both", "variable"), [(1, "GOMP_SPINCOUNT"), (2, "OMP_WAIT_POLICY")])
def test_threads_spin_only_where_a_worker_is_alone(num_both: int, variable: str) -> None:
    options = UpOptions(num_prefill=0, num_decode=0, num_both=num_both, console=False)
    workers = [spec for spec in _other_specs(options, MODEL, "x:1") if spec.name.startswith("both")]
    assert len(workers) == num_both
    assert all(variable in spec.environment for spec in workers)


def test_the_codec_of_hand_overs_is_the_gateways_setting() -> None:
    arguments = gateway_spec(UpOptions(handover_codec="int8"), MODEL).arguments
    assert arguments[arguments.index("--handover-codec") + 1] == "int8"


@pytest.mark.parametrize("counts", [(-1, 1, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)])
def test_what_could_serve_nothing_is_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest):
        UpOptions(num_prefill=counts[0], num_decode=counts[1], num_both=counts[2])


def test_a_state_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InvalidRequest, match="not a directory"):
        UpOptions(state_dir=file)
