"""The form of a search: model, GPUs, workload and targets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import streamlit as st

from console.gateway_api import GatewayApi, GatewayError
from console.plain_text import plain
from console.planner_api import Catalogue
from console.quantities import count

_LIVE_MINUTES = 60
_MAX_TRACE_BYTES = 60 << 20  # the planner accepts 64 MiB with all files of a search
_ALL_LINKS = 1_000_000
_FEW = 30  # requests; a plan based on fewer is unreliable
_KINDS = ("Known workload", "Constant lengths", "Last hour here", "Trace")
_OTHER_MODEL = "another (its config.json)"
_ROOFLINE, _MEASURED_HERE, _NAMED, _PROFILE = (
    "roofline of the model and the GPU", "measured by this cluster's workers", "by name", "a profile",
)  # fmt: skip
_OBJECTIVES = ("gpus", "goodput-per-gpu", "goodput-per-dollar")


class FormPart(NamedTuple):
    """Fields of PlanRequest and the files that they name. `missing` is what has to be filled in first."""

    fields: Mapping[str, Any]
    files: Mapping[str, bytes]
    missing: Sequence[str] = ()


def planner_form(api: GatewayApi, catalogue: Catalogue) -> FormPart:
    """Draws the form and reads it."""
    with st.container(border=True):
        parts = [_hardware(catalogue), _workload(api, catalogue)]
        parts += [_targets(), _more(api, catalogue)]
    fields = {name: value for part in parts for name, value in part.fields.items() if value is not None}
    files = {name: content for part in parts for name, content in part.files.items()}
    return FormPart(fields, files, [name for part in parts for name in part.missing])


def _hardware(catalogue: Catalogue) -> FormPart:
    columns = st.columns([3, 2, 1, 1])
    preferred = catalogue.models.index("llama-3-8b") if "llama-3-8b" in catalogue.models else 0
    model = columns[0].selectbox("Model", [*catalogue.models, _OTHER_MODEL], preferred, key="plan-model")
    gpu = columns[1].selectbox(
        "GPU", catalogue.gpus, key="plan-gpu", accept_new_options=True,
        help="One kind, or several with HOSTSxGPUS of each: h100:2x8,a100-80g:4x8",
    )  # fmt: skip
    is_mixed = ":" in gpu
    nodes = columns[2].number_input("Hosts", 1, 64, 1, key="plan-nodes", disabled=is_mixed)
    per_node = columns[3].number_input("GPUs per host", 1, 64, 8, key="plan-per-node", disabled=is_mixed)
    counts = {} if is_mixed else {"num_nodes": int(nodes), "gpus_per_node": int(per_node)}
    fields = {"model": model, "gpu": gpu, **counts}
    if model != _OTHER_MODEL:
        return FormPart(fields, {})
    given = columns[0].file_uploader("config.json of a Hugging Face model", "json", key="plan-config")
    files = {} if given is None else {"config.json": given.getvalue()}
    return FormPart({**fields, "model": "config.json"}, files, [] if files else ["the model's config.json"])


def _workload(api: GatewayApi, catalogue: Catalogue) -> FormPart:
    left, right = st.columns([5, 4])
    kind = left.segmented_control("Requests", _KINDS, default=_KINDS[0], required=True, key="plan-kind", wrap=True)
    if kind == _KINDS[1]:
        first, second = right.columns(2)
        prompt = first.number_input("Prompt (tokens)", 1, 1_000_000, 512, key="plan-in")
        output = second.number_input("Output (tokens)", 1, 1_000_000, 64, key="plan-out")
        return FormPart({"workload": f"in={int(prompt)},out={int(output)}"}, {})
    if kind == _KINDS[2]:
        with right:
            return _live(api)
    if kind == _KINDS[3]:
        types = ["json", "jsonl", "csv"]
        given = right.file_uploader("JSON rows, Mooncake's lines or Azure's CSV", types, key="plan-trace")
        if given is None:
            return FormPart({}, {}, ["a trace"])
        if given.size > _MAX_TRACE_BYTES:
            return FormPart(
                {}, {}, [f"a trace of at most {_MAX_TRACE_BYTES >> 20} MiB, such as the first part of this one"]
            )
        name = f"trace.{given.name.rpartition('.')[2]}"
        return FormPart({"workload": name}, {name: given.getvalue()})
    return FormPart({"workload": right.selectbox("Use", catalogue.workloads, key="plan-use")}, {})


def _live(api: GatewayApi) -> FormPart:
    """Uses the last hour's requests, taken again at every redraw, so a search begins with the newest."""
    try:
        workload = api.workload(_LIVE_MINUTES)
    except GatewayError as error:
        st.error(plain(str(error)), icon=":material/cloud_off:")
        return FormPart({}, {}, ["the last hour's requests"])
    rows = workload["requests"]
    if not workload["rate_per_s"]:
        st.caption("No request was answered here in the last hour, so there is no workload to use.")
        return FormPart({}, {}, ["requests in the last hour"])
    means = [sum(row[name] for row in rows) / len(rows) for name in ("prompt_len", "output_len")]
    st.caption(
        f"{count(len(rows))} requests, {workload['rate_per_s']:.3g} per second, with {count(means[0])} prompt and "
        f"{count(means[1])} output tokens each on average. "
        + ("These are few: treat the result as a hint. " if len(rows) < _FEW else "")
        + "A refused request takes the output length of the one before it; shared prefixes are unknown."
    )
    files = {"last-hour.json": json.dumps(rows).encode()}
    return FormPart({"workload": "last-hour.json", "rate_per_s": workload["rate_per_s"]}, files)


def _targets() -> FormPart:
    columns = st.columns(4)
    rate = columns[0].number_input(
        "Requests/s to sustain", 0.0, None, None, 1.0, key="plan-rate", placeholder="highest per GPU",
        help="Empty: compare layouts by goodput per GPU, or at the last hour's own rate.",
    )  # fmt: skip
    ttft_ms = columns[1].number_input("TTFT target (ms)", 1.0, None, 250.0, 10.0, key="plan-ttft")
    tpot_ms = columns[2].number_input("TPOT target (ms)", 0.1, None, 50.0, 1.0, key="plan-tpot")
    goal = columns[3].number_input("Requests in time (%)", 1.0, 100.0, 90.0, 1.0, key="plan-goal")
    fields = {"ttft_s": ttft_ms / 1000, "tpot_s": tpot_ms / 1000, "attainment": goal / 100, "rate_per_s": rate or None}
    return FormPart(fields, {})


def _more(api: GatewayApi, catalogue: Catalogue) -> FormPart:
    with st.expander("More"):
        columns = st.columns(3)
        objective = columns[0].selectbox(
            "Objective", _OBJECTIVES, None, key="plan-objective", placeholder="fewest GPUs, or goodput per GPU",
            format_func=lambda objective: objective.replace("-", " "),
        )  # fmt: skip
        affinity = columns[1].selectbox(
            "Prefill and decode workers", ("auto", "high", "low"), key="plan-affinity",
            format_func={"auto": "wherever is better", "high": "on any hosts", "low": "on the same host"}.__getitem__,
        )  # fmt: skip
        requests = columns[2].number_input("Requests per simulation", 20, 20_000, 500, 100, key="plan-requests")
        thorough = st.checkbox(
            "Thorough: skip layouts only by proven bounds (several times slower)", key="plan-thorough"
        )
        parts = [_kinds(catalogue), _promises(), _host_memory(), _latency(api)]
    fields = {"objective": objective, "affinity": affinity, "num_requests": int(requests), "is_thorough": thorough}
    return FormPart(
        {name: value for part in (fields, *(more.fields for more in parts)) for name, value in part.items()},
        {name: content for part in parts for name, content in part.files.items()},
        [missing for part in parts for missing in part.missing],
    )


def _kinds(catalogue: Catalogue) -> FormPart:
    """GPU kinds of each phase, and prices."""
    columns = st.columns(3)
    any_kind = "any kind"
    prefill = columns[0].selectbox("GPU of prefill workers", catalogue.gpus, None, key="plan-prefill-gpu",
                                   placeholder=any_kind)  # fmt: skip
    decode = columns[1].selectbox("GPU of decode workers", catalogue.gpus, None, key="plan-decode-gpu",
                                  placeholder=any_kind)  # fmt: skip
    given = columns[2].text_input("Dollars per GPU hour", key="plan-prices", placeholder="the catalogue's",
                                  help="h100=2.5, l40s=0.8")  # fmt: skip
    try:
        prices = prices_of(given)
    except ValueError:
        return FormPart({}, {}, ["prices as GPU=DOLLARS, separated by commas"])
    return FormPart({"prefill_gpu": prefill, "decode_gpu": decode, "prices": prices}, {})


def prices_of(given: str) -> dict[str, float]:
    """Parses dollars per hour by GPU. Raises ValueError."""
    pairs = [pair.partition("=") for pair in given.split(",") if pair.strip()]
    return {gpu.strip(): float(dollars) for gpu, _, dollars in pairs}


def _host_memory() -> FormPart:
    """What the GPUs' memory does not hold."""
    columns = st.columns(2)
    kv = columns[0].number_input(
        "Host memory for KV (GiB per GPU)", 0.0, None, 0.0, 16.0, key="plan-host-kv",
        help="Workers that keep KV on the host (offload_kv) are tried, too.",
    )  # fmt: skip
    weights = columns[1].number_input(
        "Host memory for weights (GiB per GPU)", 0.0, None, 0.0, 16.0, key="plan-host-weights",
        help="A model that the GPUs do not hold is planned with a share of its weights on the host (offload_weights).",
    )  # fmt: skip
    sizes = {"host_bytes_per_gpu": kv, "host_weight_bytes_per_gpu": weights}
    return FormPart({name: int(gib * 2**30) or None for name, gib in sizes.items()}, {})


def _promises() -> FormPart:
    """What counts as in time, how KV is encoded, and how many workers share a prompt."""
    columns = [*st.columns(3), *st.columns(2)]
    criterion = columns[0].selectbox(
        "In time means", ("joint", "marginal"), key="plan-criterion",
        format_func={"joint": "each request meets both", "marginal": "each target separately"}.__getitem__,
    )  # fmt: skip
    tbt_ms = columns[1].number_input("TBT target (ms)", 0.1, None, None, 1.0, key="plan-tbt", placeholder="none",
                                     help="For the longest tenth of a request's gaps between tokens.")  # fmt: skip
    codec = columns[2].selectbox(
        "KV transfer encoding", ("auto", "raw", "int8", "int4"), key="plan-codec",
        format_func=lambda codec: "whichever is better" if codec == "auto" else codec,
    )  # fmt: skip
    network = columns[3].number_input("Network per host (Gbit/s)", 0.1, None, None, 10.0, key="plan-network",
                                      placeholder="the catalogue's")  # fmt: skip
    degree = columns[4].number_input("Workers per prompt, at most", 1, 64, 1, key="plan-degree",
                                     help="Prefill workers on CPUs that compute one long prompt together "
                                     "(max_prefill_degree).")  # fmt: skip
    fields = {"criterion": criterion, "kv_codec": codec, "network_gbit_per_s": network}
    fields |= {"tbt_s": None if tbt_ms is None else tbt_ms / 1000, "max_prefill_degree": int(degree)}
    return FormPart(fields, {})


def _latency(api: GatewayApi) -> FormPart:
    left, right = st.columns(2)
    kinds = (_ROOFLINE, _MEASURED_HERE, _NAMED, _PROFILE)
    kind = left.selectbox("Latencies of workers", kinds, key="plan-latency")
    if kind == _NAMED:
        name = right.text_input("Name", "distserve:opt-13b", key="plan-latency-name")
        return FormPart({"latency": name.strip()}, {}, [] if name.strip() else ["the name of a latency source"])
    if kind == _PROFILE:
        given = right.file_uploader("Output of `halfmoon profile`", "json", key="plan-profile")
        if given is None:
            return FormPart({}, {}, ["a profile"])
        return FormPart({"latency": "profile.json"}, {"profile.json": given.getvalue()})
    if kind == _MEASURED_HERE:
        with right:
            return _measured_here(api)
    return FormPart({}, {})


def _measured_here(api: GatewayApi) -> FormPart:
    try:
        profile = measured_profile(api.cluster(_ALL_LINKS), api.cache())
    except GatewayError as error:
        st.error(plain(str(error)), icon=":material/cloud_off:")
        profile = None
    if profile is None:
        st.caption("No workers here have reported their latencies yet.")
        return FormPart({}, {}, ["measured workers"])
    st.caption("One GPU stands for one worker as it runs here; other parallelism was not measured.")
    return FormPart({"latency": "measured.json"}, {"measured.json": json.dumps(profile).encode()})


def measured_profile(cluster: Mapping[str, Any], cache: Mapping[str, Any]) -> dict[str, Any] | None:
    """Coefficients of the slowest workers known to the gateway; None if one phase was not measured."""
    blocks = {worker["worker_id"]: worker for worker in cache["workers"]}
    workers = [worker for worker in cluster["workers"] if worker["worker_id"] in blocks]
    prefills = [list(worker["prefill_model"].values()) for worker in workers if any(worker["prefill_model"].values())]
    steps = [list(worker["step_model"].values()) for worker in workers if any(worker["step_model"].values())]
    if not (prefills and steps and cache["block_bytes"]):
        return None
    speeds = [link["bytes_per_s"] for worker in workers for link in worker["links"] if link["bytes_per_s"] > 0]
    block_tokens = next(iter(blocks.values()))["block_tokens"]
    return {
        "name": "this cluster",
        "prefill": max(prefills, key=_usual_s),
        "step": max(steps, key=_usual_s),
        "kv_tokens": min(worker["total_blocks"] for worker in blocks.values()) * block_tokens,
        "kv_token_bytes": max(cache["block_bytes"] // block_tokens, 1),
        "link_bytes_per_s": min(speeds, default=0.0),
    }


def _usual_s(model: Sequence[float]) -> float:
    """Seconds of a typical prompt or step, for comparing workers."""
    fixed_s, each_s, far_s = model
    return fixed_s + 8 * each_s + 8 * 512 * far_s
