"""The processes of workers: what each is told of the others."""

from __future__ import annotations

from halfmoon.up.specs.service_specs import other_specs
from halfmoon.up.up_options import PreparedModel, UpOptions


def host_workers_of(options: UpOptions) -> dict[str, str | None]:
    specs = other_specs(options, PreparedModel("/models/m", "m"), "x:1", ["x:3"], "x:4")
    workers = [spec for spec in specs if "--role" in spec.arguments]
    variables = ("HALFMOON_PREFILL_HOST_WORKERS", "HALFMOON_DECODE_HOST_WORKERS")
    return {spec.name: next(filter(None, map(spec.environment.get, variables)), None) for spec in workers}


def test_workers_divide_the_memory_of_the_host_that_they_start_on() -> None:
    three = UpOptions(num_prefill=1, num_decode=1, num_both=1, console=False)
    assert host_workers_of(three) == {"prefill-0": "3", "decode-0": "3", "both-0": "3"}
    of_decode = UpOptions(console=False, settings={"decode": {"host_workers": "8"}})
    assert host_workers_of(of_decode) == {"prefill-0": "2", "decode-0": "8"}
    assert set(host_workers_of(UpOptions(console=False, on="ray")).values()) == {"1"}
