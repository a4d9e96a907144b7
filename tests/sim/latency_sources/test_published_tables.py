"""DistServe's coefficients and Splitwise's table: the published law, and what neither of them measured."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.latency_sources.splitwise import read_splitwise

TABLES = json.loads((files("halfmoon.sim") / "data" / "distserve.json").read_text())
CASES = [
    (engine, name, *map(int, shape.split("x")))
    for engine, models in TABLES["engines"].items()
    for name, fits in models.items()
    for shape in TABLES["kv_tokens"][name]
    if shape.split("x")[0] in fits
]
HEADER = "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time"


@pytest.mark.parametrize(("engine", "name", "tp", "pp"), CASES)
@given(st.integers(1, 4096), st.integers(1, 200), st.integers(1, 2000))
def test_distserves_law_in_its_own_units(
    engine: str, name: str, tp: int, pp: int, new: int, batch: int, context: int
) -> None:
    fit = TABLES["engines"][engine][name][str(tp)]
    model = DistServeCoefficients(name, engine).model(None, tp, pp)  # type: ignore[arg-type]
    a, b, c = fit["prefill"]
    prompt_ms = (a + b * new + c * new**2) / pp + pp
    assert 1000 * model.stage_s(new, new**2 / 2, 0, 0) == pytest.approx(prompt_ms)
    a, b, c = fit["large" if batch >= fit["large_from"] else "small"]
    step_ms = (a + b * batch * context + c * batch) / pp
    assert 1000 * model.stage_s(0, 0, batch, batch * context) == pytest.approx(step_ms)
    assert 1000 * model.launching_s(batch * context) == pytest.approx(2 + 1e-4 * batch * context)
    assert model.kv_tokens == TABLES["kv_tokens"][name][f"{tp}x{pp}"]


def test_what_distserve_did_not_measure_names_what_it_did() -> None:
    with pytest.raises(InvalidRequest, match="it has opt-13b"):
        DistServeCoefficients("gpt-2")
    with pytest.raises(InvalidRequest, match="are of a100-80g"):
        DistServeCoefficients("opt-13b").model("h100", 1, 1)
    with pytest.raises(InvalidRequest, match=r"no figures of opt-13b with TP3 x PP1: it has \(TPxPP\) 1x1"):
        DistServeCoefficients("opt-13b").model(None, 3, 1)


def test_splitwise_rows_of_other_models_gpus_and_shapes_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "perf_model.csv"
    rows = [
        f"llama2-70b,a100-80gb,{tp},{prompt},{batch},128,{100 * batch * prompt / 512 / tp},{(30 + batch) / tp}"
        for tp in (4, 8)
        for prompt in (512, 1024)
        for batch in (1, 2, 4)
    ]
    other = "bloom-176b,a100-80gb,8,512,1,128,9999,9999"
    path.write_text("\n".join([HEADER, *rows, other]) + "\n")
    table = read_splitwise(path, "llama-2-70b")
    four, eight = (table.model("a100-80g", tp, 1) for tp in (4, 8))
    assert four.prefill_s(512) == pytest.approx(0.025, rel=0.2)
    assert four.prefill_s(512) / eight.prefill_s(512) == pytest.approx(2, rel=0.05)
    assert (four.num_devices, eight.num_devices) == (4, 8)
    assert eight.kv_tokens > four.kv_tokens
    with pytest.raises(InvalidRequest, match="it has a100-80g TP4, a100-80g TP8"):
        table.model("h100", 8, 1)
    with pytest.raises(InvalidRequest, match="TP8 x PP2"):
        table.model("a100-80g", 8, 2)


def test_a_file_that_is_not_splitwises_says_so(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("model,when\nllama2-70b,today\n")
    with pytest.raises(InvalidRequest, match=r"not Splitwise's perf_model\.csv"):
        read_splitwise(path, "llama-2-70b")
    with pytest.raises(InvalidRequest, match="it has llama-2-70b, bloom-176b"):
        read_splitwise(path, "gpt-2")
