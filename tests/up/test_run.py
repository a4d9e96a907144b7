"""What `halfmoon up` starts for which options."""

from __future__ import annotations

import itertools
import json
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.credentials.credential import credential_from, new_secret
from halfmoon.rpc.credentials.operator_token import kept_token, made_token
from halfmoon.rpc.service import read_settings
from halfmoon.sim.latency_sources.worker_profile import PROFILES
from halfmoon.up.config.options import up_options
from halfmoon.up.config.read import Override, read_config
from halfmoon.up.run import cluster_secret, up, with_operator_token
from halfmoon.up.specs.service_specs import gateway_spec, http_url, other_specs, trusted
from halfmoon.up.specs.simulated import SimulatedWorkers, simulated_model
from halfmoon.up.specs.stores import StoreOptions, known_stores, remember_stores, store_specs
from halfmoon.up.state.certificates import RoleCertificates
from halfmoon.up.supervision.announcements import print_event, print_ready, print_restart
from halfmoon.up.this_host.reserved_ports import ReservedPorts
from halfmoon.up.up_options import PreparedModel, UpOptions
from services.gateway.settings import GatewaySettings
from services.kvstore.settings import KVStoreSettings

MODEL = PreparedModel("/models/m", "m")


def names(options: UpOptions) -> list[str]:
    return [spec.name for spec in other_specs(options, MODEL, "127.0.0.1:7000", ["127.0.0.1:7003"], "x:4")]


def test_one_process_a_worker() -> None:
    options = UpOptions(num_prefill=2, num_decode=1, num_both=1, console=False)
    assert names(options) == ["kvstore", "planner", "prefill-0", "prefill-1", "decode-0", "both-0"]


def test_the_codec_of_hand_overs_is_the_gateways_setting() -> None:
    arguments = gateway_spec(UpOptions(handover_codec="int8"), MODEL).arguments
    assert arguments[arguments.index("--handover-codec") + 1] == "int8"


def test_one_of_several_gateways_shares_its_port_and_comes_back_where_it_was() -> None:
    options = UpOptions(port=8000, num_gateways=2)
    alone, shared = gateway_spec(options, MODEL), gateway_spec(options, MODEL, 1, (), "127.0.0.1:7", [(5, 6), (7, 8)])
    for spec, name, place, inherited in (
        (alone, "gateway", "127.0.0.1:0", None),
        (shared, "gateway-1", "127.0.0.1:7", "[7, 8]"),
    ):
        given = dict(zip(spec.arguments[2::2], spec.arguments[3::2], strict=True))
        assert (spec.name, given["--cluster-listen"], given.get("--http-descriptors")) == (name, place, inherited)
        assert spec.restarts
    assert shared.arguments[shared.arguments.index("--sibling-descriptors") + 1] == "[5, 6]"
    assert shared.descriptors == (5, 6, 7, 8)


def test_the_console_finds_the_planner_and_the_planner_the_ledger(tmp_path: Path) -> None:
    pytest.importorskip("streamlit")
    options = UpOptions(state_dir=tmp_path, operator_token="secret")
    specs = {spec.name: spec for spec in other_specs(options, MODEL, "x:1", ["x:2"], "127.0.0.1:7")}
    planner, console = specs["planner"], specs["console"]
    assert console.environment["HALFMOON_CONSOLE_PLANNER"] == "127.0.0.1:7"
    gateway = ("--gateway", "http://127.0.0.1:8000")
    assert planner.arguments[2:] == ("--listen", "127.0.0.1:7", "--state-dir", str(tmp_path), *gateway)
    assert planner.environment == {"HALFMOON_PLANNER_OPERATOR_TOKEN": "secret"}


def test_gateway_and_planner_have_one_ledger_whose_password_is_no_argument() -> None:
    url = "postgresql://halfmoon:secret@db/halfmoon"
    options = UpOptions(ledger_url=url)
    planner = next(one for one in other_specs(options, MODEL, "x:1", ["x:2"], "x:7") if one.name == "planner")
    gateway = gateway_spec(options, MODEL)
    assert gateway.environment["HALFMOON_GATEWAY_LEDGER_URL"] == url
    assert planner.environment["HALFMOON_PLANNER_LEDGER_URL"] == url
    assert not any("secret" in argument for argument in (*gateway.arguments, *planner.arguments))


@pytest.mark.parametrize(("simulation", "is_told"), [(None, True), (SimulatedWorkers("instant"), False)])
def test_the_planner_changes_real_workers_only(simulation: SimulatedWorkers | None, is_told: bool) -> None:
    specs = other_specs(UpOptions(simulation=simulation, console=False), MODEL, "x:1", ["x:2"], "x:4", "unix:/f")
    (planner,) = [spec for spec in specs if spec.name == "planner"]
    assert (planner.arguments[-2:] == ("--fleet", "unix:/f")) == is_told


def test_keys_are_not_in_the_command_line() -> None:
    spec = gateway_spec(UpOptions(api_keys=("secret",)), MODEL)
    assert "secret" not in " ".join(spec.arguments)
    assert spec.environment["HALFMOON_GATEWAY_API_KEY"] == '["secret"]'


def test_each_process_gets_the_credential_of_its_role_alone(tmp_path: Path) -> None:
    secret, certificates = new_secret(), RoleCertificates(None, tmp_path)
    options = UpOptions(num_both=1)
    specs = [gateway_spec(options, MODEL), *other_specs(options, MODEL, "x:1", ["x:2"], "x:3")]
    roles = {}
    for spec in (trusted(spec, secret, certificates) for spec in specs):
        given = spec.environment["HALFMOON_CLUSTER_SECRET"]
        assert given == credential_from(secret, spec.cluster_role or "gateway").text()
        assert secret not in " ".join((*spec.arguments, *spec.environment.values()))
        roles[spec.name.partition("-")[0]] = spec.cluster_role
    del roles["gateway"]
    roles.pop("console", None)
    assert roles == dict.fromkeys(("prefill", "decode", "both"), "worker") | {
        "kvstore": "store",
        "planner": "planner",
    }


def test_the_secret_is_the_configured_one_or_the_state_directorys(tmp_path: Path) -> None:
    file, secret = tmp_path / "mine", new_secret()
    file.write_text(secret)
    assert cluster_secret(UpOptions(cluster_secret=secret), {}) == secret
    assert cluster_secret(UpOptions(cluster_secret_file=file), {}) == secret
    assert cluster_secret(UpOptions(state_dir=tmp_path), {"HALFMOON_CLUSTER_SECRET": secret}) == secret
    assert not (tmp_path / "cluster_secret").exists()
    made = cluster_secret(UpOptions(state_dir=tmp_path), {})
    assert made == cluster_secret(UpOptions(state_dir=tmp_path), {}) != secret
    assert secret not in repr(UpOptions(cluster_secret=secret))
    with pytest.raises(InvalidRequest, match="the cluster secret itself is needed"):
        cluster_secret(UpOptions(cluster_secret=credential_from(secret, "worker").text()), {})


@pytest.mark.parametrize("counts", [(-1, 1, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)])
def test_what_could_serve_nothing_is_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest):
        UpOptions(num_prefill=counts[0], num_decode=counts[1], num_both=counts[2])


def test_other_hosts_may_bring_what_is_missing() -> None:
    UpOptions(num_prefill=0, num_decode=1, host_address="10.0.0.1")


def test_a_state_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InvalidRequest, match="not a directory"):
        UpOptions(state_dir=file)


async def test_directories_whose_names_are_too_long_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / (300 * "x")
    StoreOptions(disk_dir=directory)  # the store says why it cannot use it
    with pytest.raises(InvalidRequest, match="cannot be made: File name too long"):
        await up(UpOptions(state_dir=directory), Console())


def test_simulated_workers_are_shared_by_their_processes() -> None:
    simulation = SimulatedWorkers("instant", time_scale=2.0, num_processes=3)
    specs = other_specs(
        UpOptions(num_prefill=4, num_decode=2, simulation=simulation), MODEL, "x:1", ["127.0.0.1:7003"], "x:4"
    )
    processes = [spec for spec in specs if "services.simulation" in spec.arguments]
    assert len(processes) == 3
    for role, count in (("--prefill", 4), ("--decode", 2), ("--both", 0)):
        shares = [int(spec.arguments[spec.arguments.index(role) + 1]) for spec in processes]
        assert sum(shares) == count
        assert max(shares) - min(shares) <= 1
    assert not [spec for spec in specs if spec.name.startswith(("prefill", "decode"))]


def test_the_model_of_simulated_workers_has_no_weights_and_their_context(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 8, "vocab_size": 5}))
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (model / name).write_text("{}")
    made = simulated_model(model, SimulatedWorkers("instant"), tmp_path / "state")
    assert sorted(file.name for file in made.iterdir()) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    config = json.loads((made / "config.json").read_text())
    assert config == {"max_position_embeddings": PROFILES["instant"].context_tokens, "vocab_size": 5}


def test_an_unknown_profile_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidRequest, match="profile"):
        SimulatedWorkers("nothing")


def test_workers_find_the_store_wherever_its_tiers_are(tmp_path: Path) -> None:
    store = StoreOptions(cold_url="s3://key:secret@bucket", dram_bytes="1GiB", disk_codec="int8+zstd")
    specs = other_specs(
        UpOptions(console=False, store=store, state_dir=tmp_path), MODEL, "x:1", ["127.0.0.1:7003"], "x:4"
    )
    kvstore = next(spec for spec in specs if spec.name == "kvstore")
    given = dict(zip(kvstore.arguments[2::2], kvstore.arguments[3::2], strict=True))
    assert (given["--dram-bytes"], given["--disk-dir"]) == ("1GiB", str(tmp_path / "kvstore"))
    assert given["--disk-codec"] == "int8+zstd"
    assert kvstore.environment == {"HALFMOON_KVSTORE_COLD_URL": "s3://key:secret@bucket"}
    assert "secret" not in " ".join(kvstore.arguments)
    for spec in specs:
        if spec.name.startswith(("prefill", "decode")):
            assert spec.arguments[spec.arguments.index("--kv-store") + 1] == given["--listen"]


def test_workers_of_each_role_use_several_stores_in_turns(tmp_path: Path) -> None:
    options = UpOptions(
        num_prefill=3, num_decode=2, console=False, store=StoreOptions(num_stores=2), state_dir=tmp_path
    )
    specs = {spec.name: spec for spec in other_specs(options, MODEL, "x:1", ["s:0", "s:1"], "x:4")}
    used = {
        name: spec.arguments[spec.arguments.index("--kv-store") + 1]
        for name, spec in specs.items()
        if name.startswith(("prefill", "decode"))
    }
    assert used == {"prefill-0": "s:0", "prefill-1": "s:1", "prefill-2": "s:0", "decode-0": "s:0", "decode-1": "s:1"}
    directories = [
        specs[f"kvstore-{n}"].arguments[specs[f"kvstore-{n}"].arguments.index("--disk-dir") + 1] for n in (0, 1)
    ]
    assert directories == [str(tmp_path / "kvstore" / "0"), str(tmp_path / "kvstore" / "1")]
    peers = {
        name: [value for flag, value in itertools.pairwise(spec.arguments) if flag == "--peers"]
        for name, spec in specs.items()
        if name.startswith("kvstore")
    }
    assert peers == {"kvstore-0": ["s:1"], "kvstore-1": ["s:0"]}
    with pytest.raises(InvalidRequest, match="store"):
        StoreOptions(num_stores=0)


def test_operators_find_the_stores_that_were_started(tmp_path: Path) -> None:
    assert known_stores(tmp_path) == ()
    remember_stores(tmp_path, ["a:1", "b:2"], print)
    assert known_stores(tmp_path) == ("a:1", "b:2")


def test_a_codec_that_there_is_not_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match="int7"):
        StoreOptions(dram_codec="int7")


def test_gateway_and_console_have_one_operator_token_and_the_gateway_knows_all_stores() -> None:
    pytest.importorskip("streamlit")
    options = UpOptions(operator_token="o", simulation=SimulatedWorkers("instant"))
    gateway = gateway_spec(options, MODEL, stores=["127.0.0.1:7003", "127.0.0.1:7004"])
    assert gateway.environment["HALFMOON_GATEWAY_OPERATOR_TOKEN"] == "o"
    named = [value for name, value in itertools.pairwise(gateway.arguments) if name == "--kv-store"]
    assert named == ["127.0.0.1:7003", "127.0.0.1:7004"]
    console = next(
        spec for spec in other_specs(options, MODEL, "x:1", ["127.0.0.1:7003"], "x:4") if spec.name == "console"
    )
    assert console.environment["HALFMOON_CONSOLE_OPERATOR_TOKEN"] == "o"
    assert "o" not in (*gateway.arguments, *console.arguments)


@pytest.mark.parametrize(("host", "given", "is_made"), [("127.0.0.1", None, False), ("0.0.0.0", None, True)])
def test_the_operator_token_is_made_once_and_always_needed_beyond_loopback(
    host: str, given: str | None, is_made: bool, tmp_path: Path
) -> None:
    options = with_operator_token(UpOptions(host=host, operator_token=given, state_dir=tmp_path))
    assert bool(options.operator_token) == is_made
    assert options.console_token == kept_token(tmp_path) == made_token(tmp_path)
    assert stat.S_IMODE((tmp_path / "operator_token").stat().st_mode) == 0o600
    again = with_operator_token(UpOptions(host=host, state_dir=tmp_path))
    assert again.console_token == options.console_token
    other = tmp_path / "other"
    assert with_operator_token(UpOptions(host=host, operator_token="mine", state_dir=other)).operator_token == "mine"
    assert not other.exists()


@pytest.mark.parametrize("shows_token_file", [False, True])
def test_where_the_operator_token_is_is_told_and_not_the_token(
    shows_token_file: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = UpOptions(operator_token="hush", state_dir=Path("/s"))
    print_ready(options, Console(), "http://x:1", "m", [], shows_token_file=shows_token_file)
    said = capsys.readouterr().out
    assert ("in /s/operator_token" in said, "hush" in said) == (shows_token_file, False)


@pytest.mark.parametrize(
    ("url", "cert", "trust"),
    [
        ("http://127.0.0.1:1", None, []),
        ("https://127.0.0.1:1", Path("/c/tls.crt"), ["-k"]),
        ("https://10.0.0.1:1", Path("/c c/tls.crt"), ["--cacert", "/c c/tls.crt"]),
    ],
)
def test_the_printed_command_trusts_the_certificate_and_names_any_model(
    url: str, cert: Path | None, trust: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = UpOptions(http_tls_cert=cert, http_tls_key=cert, state_dir=Path("/[s]"))
    print_ready(options, Console(), url, "the user's ü", [], shows_token_file=False)
    said = capsys.readouterr().out
    assert "logs: /[s]/logs" in said
    words = shlex.split(said.splitlines()[-1])
    assert words[:-5] == ["curl", "-N", *trust]
    assert words[-5] == f"{url}/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "the user's ü"


def test_brackets_in_printed_commands_are_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    """To zsh they are patterns."""
    print_ready(
        UpOptions(host_address="[::1]", cluster_port=1), Console(), "http://[::1]:2", "m", [], shows_token_file=False
    )
    said = capsys.readouterr().out
    assert "halfmoon join '[::1]:1' " in said
    assert "curl -N 'http://[::1]:2/v1/chat/completions' " in said


def test_addresses_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich takes `[fd00]` for a style, and `:a:` for an emoji."""
    options = UpOptions(host_address="[fd00:a:b::1]", cluster_port=1)
    print_ready(options, Console(), "http://[fd00:a:b::1]:2", "m", [], shows_token_file=False)
    said = capsys.readouterr().out
    assert "halfmoon join '[fd00:a:b::1]:1' " in said
    assert "halfmoon is ready: http://[fd00:a:b::1]:2\n" in said


@pytest.mark.parametrize("written", ["::1", "[::1]"])
def test_an_ipv6_address_has_brackets_before_a_port(written: str) -> None:
    given = [Override("hosts.address", written, "--host-address"), Override("gateway.host", written, "--host")]
    options = up_options(read_config(None, given))
    assert options.host == "::1"
    assert options.host_address == "[::1]"
    assert http_url(options, 8000) == "http://[::1]:8000"
    with ReservedPorts() as ports:
        assert ports.address(options.host_address).startswith("[::1]:")


def test_services_read_ipv6_addresses_of_stores_and_peers() -> None:
    addresses = ["[::1]:7003", "[::1]:7004", "[::1]:7005"]
    gateway = gateway_spec(UpOptions(), MODEL, stores=addresses)
    assert read_settings(GatewaySettings, gateway.arguments[2:]).kv_store == tuple(addresses)
    store = store_specs(StoreOptions(num_stores=3), Path("/s"), addresses)[0]
    assert read_settings(KVStoreSettings, store.arguments[2:]).peers == tuple(addresses[1:])


@pytest.mark.parametrize("returns", [False, True])
def test_the_end_of_a_worker_that_is_started_again_is_told_once(
    returns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    print_event(Console(), "decode-0", {"event": "worker.drained", "returns": returns})
    if returns:
        print_restart(Console(), "decode-0 was told to stop", 0.0)
    assert capsys.readouterr().out.count("again") == 1


def test_workers_join_gateways_of_other_hosts_too(tmp_path: Path) -> None:
    options = UpOptions(host_address="10.0.0.1", ledger_url="postgresql://l", other_gateways=("gateways.example:7000",))
    gateway = gateway_spec(options, MODEL)
    assert gateway.arguments[gateway.arguments.index("--num-gateways") + 1] == "2"
    joined = ",".join(("10.0.0.1:7000", *options.other_gateways))
    specs = {spec.name: spec for spec in other_specs(options, MODEL, joined, ["x:2"], "x:3")}
    prefill = specs["prefill-0"]
    assert prefill.arguments[prefill.arguments.index("--gateway") + 1] == "10.0.0.1:7000,gateways.example:7000"
    assert prefill.num_gateways == 1  # it does not wait for those of other hosts
    UpOptions(**{**OTHERS, "num_prefill": 0, "num_decode": 0})  # a gateway alone


OTHERS: dict[str, Any] = {"host_address": "h", "ledger_url": "l", "other_gateways": ("x:1",)}


@pytest.mark.parametrize("missing", ["host_address", "ledger_url"])
def test_gateways_on_several_hosts_need_an_address_and_a_ledger(missing: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--host-address and --ledger-url"):
        UpOptions(**{**OTHERS, missing: None})
