"""Configuration files: what they say, what wins, and how mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfmoon.config.qos_classes import DEFAULT_TARGETS
from halfmoon.engine.config import HostChoiceConfig, OffloadConfig
from halfmoon.errors import InvalidRequest
from halfmoon.up.config.options import up_options
from halfmoon.up.config.read import Override, parse_config, read_config
from halfmoon.up.config.settings_table import settings_table
from halfmoon.up.specs.service_specs import gateway_spec, other_specs
from halfmoon.up.supervision.child import ServiceSpec
from halfmoon.up.up_options import PreparedModel, UpOptions
from halfmoon.worker.engine_host import host_choice_config, load_shared, loaded_host, offload_config
from services.decode.settings import DecodeSettings
from services.gateway.settings import GatewaySettings
from services.kvstore.settings import KVStoreSettings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "guide" / "examples" / "halfmoon.yaml"
DOCUMENT = ROOT / "docs" / "reference" / "settings.md"
NO_CONSOLE = "console: {enabled: false}\n"


def options_of(text: str, *overrides: Override) -> UpOptions:
    return up_options(parse_config(NO_CONSOLE + text, "halfmoon.yaml", overrides))


def started(options: UpOptions) -> dict[str, ServiceSpec]:
    model = PreparedModel("/m", "m")
    specs = [gateway_spec(options, model), *other_specs(options, model, "x:1", ["x:2"], "x:3")]
    return {spec.name: spec for spec in specs}


def arguments_of(spec: ServiceSpec) -> dict[str, str]:
    return dict(zip(spec.arguments[2::2], spec.arguments[3::2], strict=True))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gateway:\n  prot: 1", ["halfmoon.yaml:2: gateway.prot: unknown field; did you mean port?"]),
        ("gatway: {}", ["halfmoon.yaml:1: gatway: unknown field; did you mean gateway?"]),
        ("console: {colour: 1}", ["console.colour: unknown field; known fields: enabled, port"]),
        (
            "workers:\n  prefill:\n  - {}\n  - {tensor_parallel: two}\n  decode: {count: -1}",
            [
                "halfmoon.yaml:4: workers.prefill[1].tensor_parallel: Input should be a valid integer",
                "halfmoon.yaml:5: workers.decode[0].count: Input should be greater than or equal to 0",
            ],
        ),
        ("stores: {dram_codec: int7}", ["stores.dram_codec: no codec is called 'int7': there are raw, int8"]),
        (
            "classes: {gold: {reserved: 2}, tin: {}, iron: {attainment: 0}}",
            ["classes: gold: a class's reserved must be between 0 and 1; iron: a class's attainment must be above 0"],
        ),
        ("classes: {gold: {ttft: 3}}", ["classes.gold.ttft: unknown field; did you mean ttft_s?"]),
        (
            "gateway:\n  placement: random\n  max_prefill_degree: 4",
            ["halfmoon.yaml:1: gateway: max_prefill_degree 4 has no effect with placement random, which predicts no"],
        ),
        (
            "cluster: {kv_policy: sinks:4, workers: [{role: both}]}",
            ["classes: default: kv_policy is 'sinks:4': write sinks:S"],
        ),
        (
            "classes: [gold]\ncluster: {kv_policy: 'sinks:4+64', workers: [{role: both}]}",
            ["halfmoon.yaml:1: classes: must be a mapping"],
        ),
        ("cluster: {workers: [{role: both}]}\nworkers: {both: {}}", ["leave the roles of workers"]),
        ("model: [", ["halfmoon.yaml is not YAML"]),
        (
            "gateway: {port: 1}\nclasses: {}\ngateway: {port: 2}",
            ["halfmoon.yaml is not YAML: line 3: gateway was already written on line 1"],
        ),
        ("classes: {a: {}, a: {}}", ["line 1: a was already written on line 1"]),
        ("model: " + 2_000 * "[", ["halfmoon.yaml is not YAML: it is nested too deeply"]),
        ("model: !!timestamp x", ["halfmoon.yaml is not YAML: a value does not fit its tag: leave the tag out"]),
        ("model: !!bool x", ["halfmoon.yaml is not YAML: a value does not fit its tag: leave the tag out"]),
        ("model: 2026-13-45", ["halfmoon.yaml is not YAML: month must be in 1..12"]),
        (
            "workers: {prefill: {count: 100000000}}\ngateway: {replicas: 100000}\nstores: {count: 100000}",
            [
                "workers.prefill[0].count: Input should be less than or equal to 4096",
                "gateway.replicas: Input should be less than or equal to 64",
                "stores.count: Input should be less than or equal to 64",
            ],
        ),
        ("cluster: {workers: [{role: both, count: 100000000}]}", ["cluster.workers[0].count: Input should be less"]),
        (
            "workers: {both: {kv_memory: 0, kv_window: 0, num_threads: 1000000, block_tokens: 99999999999}}",
            [
                "workers.both[0].kv_memory: Input should be greater than 0",
                "workers.both[0].kv_window: Input should be greater than 0",
                "workers.both[0].num_threads: Input should be less than or equal to 4096",
                "workers.both[0].block_tokens: Input should be less than or equal to 2147483647",
            ],
        ),
        (
            "workers: {prefill: {max_running: true}, all: {kv_memory: yes, offload_weights: on, lease_s: true}}\n"
            "gateway: {port: false, max_connections: true}\nplanner: {processes: true}\n"
            "tenants: {a: {weight: true, kv_bytes: true}}\ncluster: {workers: [{role: both, count: true}]}",
            [
                "halfmoon.yaml:1: workers.prefill[0].max_running: must be a number, not true",
                "workers.all.kv_memory: must be a number, not true",
                "workers.all.offload_weights: must be a number, not true",
                "workers.all.lease_s: must be a number, not true",
                "halfmoon.yaml:2: gateway.port: must be a number, not false",
                "gateway.max_connections: must be a number, not true",
                "planner.processes: must be a number, not true",
                "tenants.a.weight: must be a number, not true",
                "tenants.a.kv_bytes: must be a number, not true",
                "cluster.workers[0].count: Input should be a valid integer",
            ],
        ),
        ("security: {api_key: [5]}", ["security.api_key[0]: must be a text"]),
        ("security: {api_key: {a: 1}}", ["security.api_key[0]: must be a text"]),
        ("gateway: 3\nclasses: [a]", ["1: gateway: must be a mapping", "2: classes: must be a mapping"]),
        ("workers: {prefill: 3}", ["workers.prefill: must be a list"]),
        (
            "security: {api_key: [''], operator_token: ''}",
            ["security.api_key[0]: must not be empty", "security.operator_token: must not be empty"],
        ),
        ("gateway: {port: 8501}", ["halfmoon.yaml: gateway.port and console.port are both 8501"]),
        ("- model", ["has to be a mapping"]),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, says: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_config(text, "halfmoon.yaml")
    for line in says:
        assert line in caught.value.message


def test_a_wrong_flag_is_told_by_its_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^--port: Input should be less than or equal to 65535"):
        parse_config("", "halfmoon.yaml", [Override("gateway.port", 65536, "--port")])
    for size in ("lots", "3 bananas"):
        with pytest.raises(InvalidRequest, match=r"^--kv-memory: must be a size, such as 512MiB"):
            parse_config("", "halfmoon.yaml", [Override("workers.all.kv_memory", size, "--kv-memory")])


def test_options_that_contradict_each_other_are_both_named() -> None:
    options = {"port": 8124, "max_prefill_degree": 2, "placement": "random"}
    overrides = [Override(f"gateway.{name}", value, f"--{name.replace('_', '-')}") for name, value in options.items()]
    with pytest.raises(InvalidRequest, match="--max-prefill-degree, --placement: gateway: max_prefill_degree 2 has no"):
        parse_config("", "halfmoon.yaml", overrides)


def test_without_a_file_one_worker_prefills_and_one_decodes() -> None:
    options = options_of("")
    assert (options.num_prefill, options.num_decode, options.num_both, options.port) == (1, 1, 0, 8000)


@pytest.mark.parametrize(
    ("workers", "counts"),
    [
        ("prefill: {count: 3}", (3, 1, 0)),
        ("decode: [{count: 2}, {count: 1}]", (1, 3, 0)),
        ("both: {count: 2}", (0, 0, 2)),
        ("{both: {count: 1}, prefill: {count: 1}}", (1, 0, 1)),
        ("both: {count: 0}", (1, 1, 0)),
    ],
)
def test_a_role_that_is_not_named_has_one_worker_unless_others_do_both(
    workers: str, counts: tuple[int, int, int]
) -> None:
    options = options_of(f"workers:\n  {workers}" if not workers.startswith("{") else f"workers: {workers}")
    assert (options.num_prefill, options.num_decode, options.num_both) == counts


def test_each_service_is_started_with_its_part() -> None:
    specs = started(options_of((EXAMPLE.read_text()).partition("console:")[0]))
    decode = arguments_of(specs["decode-0"])
    assert (decode["--max-running"], decode["--kv-memory"], decode["--block-tokens"]) == ("32", str(2 << 30), "64")
    assert "--max-running" not in specs["prefill-0"].arguments
    assert specs["kvstore"].environment["HALFMOON_KVSTORE_DRAM_POLICY"] == "cost-aware"
    assert specs["kvstore"].environment["HALFMOON_KVSTORE_TTL_S"] == "86400.0"
    assert specs["planner"].environment["HALFMOON_PLANNER_MAX_RUNNING"] == "1"
    gateway = arguments_of(specs["gateway"])
    assert (gateway["--placement"], gateway["--admission"]) == ("kvcache-centric", "predicted")
    assert '"ttft_s": 2' in specs["gateway"].environment["HALFMOON_GATEWAY_CLASSES"]


def test_a_field_called_on_is_written_without_quotes() -> None:
    config = parse_config("hosts:\n  on: ray\n", "halfmoon.yaml")
    assert config.hosts.on == "ray"


def test_what_is_forwarded_is_what_the_services_take(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "gateway: {balancing_threshold: 3, allowed_origins: ['*'], slo: off, admission: off}\n"
    text += "stores: {disk_policy: lfu, ttl_s: 5}\nclasses: {gold: {ttft_s: 2, rules: [{kind: model, value: m}]}}\n"
    specs = started(
        options_of(
            text + "workers: {all: {kv_memory: 1GiB, cuda_graphs: false, speculation: off}, decode: {max_running: 3}}"
        )
    )
    for spec in (specs["gateway"], specs["kvstore"]):
        for name, value in spec.environment.items():
            monkeypatch.setenv(name, value)
    gateway = GatewaySettings(_cli_parse_args=list(specs["gateway"].arguments[2:]))
    assert (gateway.balancing_threshold, gateway.allowed_origins, gateway.slo, gateway.admission) == (
        3,
        ("*",),
        "off",
        "off",
    )
    assert gateway.classes["gold"].rules[0].kind == "model"
    stores = KVStoreSettings(_cli_parse_args=list(specs["kvstore"].arguments[2:]))
    assert (stores.disk_policy, stores.ttl_s) == ("lfu", 5)
    worker = DecodeSettings(_cli_parse_args=list(specs["decode-0"].arguments[2:]))
    assert (worker.kv_memory, worker.cuda_graphs, worker.max_running) == (1 << 30, False, 3)
    assert worker.speculation == "off"


def test_flags_win_over_the_file_also_where_one_group_says_something_else() -> None:
    text = "model: {path: a, name: b}\ngateway: {port: 1}\nworkers: {decode: {device: cuda, max_running: 2}}"
    overrides = [
        Override("gateway.port", 2, "--port"),
        Override("model.path", "c", "--model"),
        Override("workers.all.device", "cpu", "--device"),
    ]
    options = options_of(text, *overrides)
    assert (options.port, options.model, options.model_name, options.device) == (2, "c", "b", "cpu")
    assert arguments_of(started(options)["decode-0"])["--device"] == "cpu"
    assert parse_config("model: a", "f", [Override("model.name", "n", "--model-name")]).model.path == "a"


def test_a_group_on_the_cpu_takes_no_gpu_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "g0,g1")
    specs = started(options_of("workers: {prefill: {device: cpu}, decode: {tensor_parallel: 2}}"))
    assert "CUDA_VISIBLE_DEVICES" not in specs["prefill-0"].environment
    assert specs["decode-0"].environment["CUDA_VISIBLE_DEVICES"] == "g0,g1"


def test_a_plan_is_a_configuration_to_which_sections_may_be_added() -> None:
    plan = "model: x\nlayout: 1 both\nexpected: {rate_per_s: 1.0}\nhandover_codec: int8\n"
    plan += "cluster: {network: {a: 1}, workers: [{role: both, count: 2, tp: 1, max_running: 9, latency: l}]}\n"
    options = options_of(plan + "gateway: {port: 5}\nworkers: {all: {dtype: float32}}")
    assert (options.num_both, options.handover_codec, options.port) == (2, "int8", 5)
    worker = arguments_of(started(options)["both-1"])
    assert (worker["--max-running"], worker["--dtype"]) == ("9", "float32")


def test_classes_keep_the_kv_that_a_plan_counts_on() -> None:
    plan = "model: x\ncluster: {kv_policy: 'sinks:4+1024', workers: [{role: both, count: 2}]}\n"
    config = parse_config(plan, "plan.yaml")
    assert config.classes == {"default": DEFAULT_TARGETS.model_copy(update={"kv_policy": "sinks:4+1024"})}
    (environment,) = [spec.environment for name, spec in started(options_of(plan)).items() if name == "gateway"]
    assert json.loads(environment["HALFMOON_GATEWAY_CLASSES"])["default"]["kv_policy"] == "sinks:4+1024"
    plan += "gateway: {slo: off}\nclasses: {a: {ttft_s: 1.0}, b: {kv_policy: null}, c: {kv_policy: 'snapkv:9+9'}}"
    policies = {name: one.kv_policy for name, one in parse_config(plan, "plan.yaml").classes.items()}
    assert policies == {"default": "sinks:4+1024", "a": "sinks:4+1024", "b": None, "c": "snapkv:9+9"}
    assert parse_config(plan, "plan.yaml").classes["default"].ttft_s is None
    with pytest.raises(InvalidRequest, match=r"kv_policy sinks:4\+1024: vLLM keeps all KV"):
        options_of("engine: vllm\n" + plan)


def test_the_example_and_the_file_of_compose_are_configurations() -> None:
    assert set(read_config(EXAMPLE).classes) == {"gold", "default"}
    assert read_config(ROOT / "deploy" / "halfmoon.yaml").model.path == "demo"
    assert yaml.safe_load(EXAMPLE.read_text())


def test_the_document_has_every_field() -> None:
    assert "| `value` | text | required |" in settings_table()
    assert settings_table() in DOCUMENT.read_text(), "paste what `python -m halfmoon.up.config.settings_table` says"


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_config(tmp_path / "halfmoon.yaml")


def test_a_merged_mapping_may_be_overridden() -> None:
    text = "workers: {prefill: &one {count: 1, max_running: 3}, decode: {<<: *one, max_running: 4}}"
    assert parse_config(text, "halfmoon.yaml").workers.decode[0].max_running == 4


def test_an_empty_section_has_its_defaults() -> None:
    text = "gateway:\nworkers: {all: , prefill: }\nclasses:\nstate_dir:\nledger_url:\nmodel:\n"
    assert parse_config(text, "halfmoon.yaml") == parse_config("", "halfmoon.yaml")


def test_one_text_is_a_list_of_one() -> None:
    text = "security: {api_key: sk-x}\nmodel: {alias: a}\ngateway: {allowed_origins: '*'}"
    config = parse_config(text, "halfmoon.yaml")
    assert (config.security.api_key, config.model.alias, config.gateway.allowed_origins) == (("sk-x",), ("a",), ("*",))


def test_adapters_reach_gateways_and_workers_of_vllm() -> None:
    lora = Override("model.lora", ["sql=/a", "fr=/b"], "--lora")
    specs = started(options_of("engine: vllm", lora))
    for name, service in (("gateway", "GATEWAY"), ("prefill-0", "PREFILL"), ("decode-0", "DECODE")):
        assert specs[name].environment[f"HALFMOON_{service}_LORA"] == '["sql=/a", "fr=/b"]'
    for text in ("", "engine: sim", "engine: vllm\nworkers: {decode: {engine: halfmoon}}"):
        with pytest.raises(InvalidRequest, match="only vLLM computes adapters"):
            options_of(text, lora)


def test_a_worker_with_our_engine_refuses_adapters() -> None:
    with pytest.raises(InvalidRequest, match="our own engine computes no adapters"):
        load_shared(DecodeSettings(gateway="x:1", device="cpu", lora=("sql=/a",)))


def test_rounded_weights_are_the_gateways_and_all_workers() -> None:
    specs = started(options_of("model: {quantization: int8}"))
    for name, service in (("gateway", "GATEWAY"), ("prefill-0", "PREFILL"), ("decode-0", "DECODE")):
        assert specs[name].environment[f"HALFMOON_{service}_QUANTIZATION"] == "int8"
    for text in ("engine: vllm", "engine: sim", "workers: {decode: {engine: vllm}}"):
        with pytest.raises(InvalidRequest, match="only our own engine rounds weights"):
            options_of(text, Override("model.quantization", "int8", "--quantization"))


def test_a_worker_with_vllm_refuses_rounded_weights() -> None:
    settings = DecodeSettings(gateway="x:1", engine="vllm", quantization="int4")
    with pytest.raises(InvalidRequest, match="--quantization int4 is of our own engine"):
        loaded_host(settings, None)


def test_what_is_kept_on_the_host_reaches_the_workers() -> None:
    flags = {"offload_kv": "host", "offload_recompute": "never", "offload_weights": "0.5"}
    overrides = [Override(f"workers.all.{name}", value, f"--{name}") for name, value in flags.items()]
    arguments = started(options_of("", *overrides))["decode-0"].arguments
    for name, value in flags.items():
        assert arguments[arguments.index("--" + name.replace("_", "-")) + 1] == value
    assert "--offload-kv" not in started(options_of(""))["decode-0"].arguments


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, OffloadConfig(4 << 30, "latency", "auto")),
        ({"offload_weights": 0.5}, OffloadConfig(4 << 30, "throughput", "auto")),
        ({"offload_bytes": 1 << 20, "offload_recompute": "never"}, OffloadConfig(1 << 20, "latency", "never")),
        ({"offload_schedule": "latency", "offload_weights": 1.0}, OffloadConfig(4 << 30, "latency", "auto")),
    ],
)
def test_kv_on_the_host_is_in_columns_where_weights_are_loaded(
    options: dict[str, Any], expected: OffloadConfig
) -> None:
    settings = DecodeSettings(gateway="x:1", offload_kv="host", **options)
    assert offload_config(settings) == expected
    assert load_shared(settings) is None, "it has threads"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"offload_weights": 0.5, "offload_kv": "host"}, None),
        ({"offload_weights": "auto"}, HostChoiceConfig(weights=True, kv=False)),
        (
            {"offload_kv": "auto", "offload_schedule": "latency", "device_memory": 1 << 30},
            HostChoiceConfig(weights=False, kv=True, objective="latency", device_bytes=1 << 30),
        ),
    ],
)
def test_what_is_on_the_host_may_be_chosen(options: dict[str, Any], expected: HostChoiceConfig | None) -> None:
    settings = DecodeSettings(gateway="x:1", **options)
    assert host_choice_config(settings) == expected
    assert (offload_config(settings) is None) == ("offload_kv" not in options)
    if expected is not None:
        assert load_shared(settings) is None


def test_device_memory_without_a_choice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="else give kv_memory"):
        host_choice_config(DecodeSettings(gateway="x:1", device_memory=1 << 30))


def test_a_worker_with_vllm_refuses_our_weights_on_the_host() -> None:
    with pytest.raises(InvalidRequest, match="cpu-offload-gb"):
        loaded_host(DecodeSettings(gateway="x:1", engine="vllm", offload_weights=0.5), None)


def test_a_worker_with_vllm_refuses_rounded_kv() -> None:
    with pytest.raises(InvalidRequest, match="--kv-dtype int8 is of our own engine"):
        loaded_host(DecodeSettings(gateway="x:1", engine="vllm", kv_dtype="int8"), None)
