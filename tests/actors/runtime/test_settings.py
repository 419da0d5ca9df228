"""The settings of a host: read from flags and environment, checked, and handed on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from greenroom.actors.runtime import capacity
from greenroom.actors.runtime.capacity import capacity_of, count_gpus
from greenroom.actors.runtime.settings import (
    FIELDS,
    HostSettings,
    differences,
    given_fields,
    read_settings,
    variable,
)
from greenroom.core.errors import InvalidRequestError

HERE = {"bind": "10.0.0.1"}

# Each setting with a value other than its default.
SAMPLES = {
    "state_dir": "/srv/state",
    "admin_port": "1901",
    "address": "10.0.0.2:1901",
    "key_file": "/srv/key",
    "grpc_port": "9001",
    "grpc_servicer_functions": "a_pb2_grpc.add_a,b.c.add_b",
    "grpc_dir": "/srv",
    "grpc_request_timeout_s": "2.5",
    "grpc_max_receive_message_length": "100",
    "grpc_maximum_concurrent_rpcs": "7",
    "grpc_reflection": "false",
    "grpc_ssl_ca_certs": "/srv/ca.pem",
    "bind": "10.0.0.1",
    "advertise": "192.0.2.1",
    "join": "leader:1900,other:1900",
    "store": "postgresql://greenroom@db.example/greenroom",
    "host_name": "one",
    "num_cpus": "0.5",
    "num_gpus": "2",
    "memory": "1e9",
    "resources": "disk=2,zone=a",
    "no_replicas": "true",
    "silence_timeout_s": "7.5",
    "log_format": "json",
    "log_max_bytes": "0",
    "log_files": "2",
    "http_host": "::1",
    "http_port": "0",
    "http_pages_host": "127.0.0.2",
    "http_pages_port": "9000",
    "http_root_path": "/api",
    "http_request_timeout_s": "2.5",
    "http_keep_alive_timeout_s": "5",
    "http_header_timeout_s": "6",
    "http_body_timeout_s": "7",
    "http_send_timeout_s": "8",
    "http_ssl_keyfile": "/srv/key.pem",
    "http_ssl_certfile": "/srv/cert.pem",
    "http_workers": "2",
    "http_max_connections_per_client": "9",
    "http_max_target_bytes": "8000",
    "http_max_header_bytes": "16000",
    "http_max_body_bytes": "none",
    "http_max_waiting_body_bytes": "2000000",
    "http_max_websocket_message_bytes": "1000",
    "http_middlewares": "a.b:C,d:E",
    "http_middlewares_dir": "/srv",
    "http_trusted_proxies": "10.0.0.0/8,::1",
    "http_cors": "https://a.example",
    "http_empty_path_segments": "true",
    "http_short_way": "false",
}
NEEDS = {
    "http_ssl_keyfile": {"http_ssl_certfile": "/srv/c.pem", "http_ssl_keyfile": "/srv/k.pem"},
    "http_ssl_certfile": {"http_ssl_certfile": "/srv/c.pem", "http_ssl_keyfile": "/srv/k.pem"},
    "join": HERE,
    "advertise": HERE,
    "store": HERE,
    "grpc_servicer_functions": {"grpc_port": "9001"},
    "grpc_ssl_ca_certs": {"http_ssl_certfile": "/srv/c.pem", "http_ssl_keyfile": "/srv/k.pem"},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_setting_is_read_from_its_flag_and_its_variable_and_handed_on(name):
    needs = NEEDS.get(name, {})
    others = {other: value for other, value in needs.items() if other != name}
    by_flag = read_settings({}, **{name: SAMPLES[name]}, **others)
    by_variable = read_settings({variable(name): SAMPLES[name]}, **others)
    assert by_flag == by_variable
    assert by_flag != read_settings({}, **needs)
    environ = by_flag.to_environ()
    assert read_settings(environ) == by_flag
    assert differences(read_settings({}, **needs), environ, [name]) or name in {
        "state_dir",
        "address",
        "key_file",
        "log_format",
    }


def test_every_setting_has_a_sample_and_a_description():
    assert FIELDS.keys() == SAMPLES.keys()
    for name, field in FIELDS.items():
        assert str(field.description).endswith("."), name


def test_a_flag_goes_before_the_variable_and_an_empty_variable_is_none():
    environ = {"GREENROOM_HTTP_PORT": "9000", "GREENROOM_ADMIN_PORT": "", "HOME": "/"}
    settings = read_settings(environ, http_port="9001", http_workers=None)
    assert (settings.http.port, settings.admin_port) == (9001, 1900)
    assert given_fields(environ, http_workers="2") == {"http_port", "http_workers"}


def test_the_environment_of_the_process_counts(monkeypatch):
    monkeypatch.setenv("GREENROOM_HTTP_PORT", "9000")
    monkeypatch.setenv("XDG_STATE_HOME", "/srv/xdg")
    monkeypatch.delenv("GREENROOM_STATE_DIR", raising=False)
    settings = read_settings()
    assert (settings.http.port, settings.state_dir) == (9000, Path("/srv/xdg/greenroom"))
    assert HostSettings().http.port == 8000, "made directly, it reads no environment"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("admin_port", "many", "admin_port='many': must be a valid integer"),
        ("http_port", "99999", "http.port='99999': must be less than or equal to 65535"),
        ("http_prot", "1", "GREENROOM_HTTP_PROT: no such setting; did you mean GREENROOM_HTTP_PO"),
        ("http_x", "1", "GREENROOM_HTTP_X: no such setting"),
        ("http", '{"port": 1}', "GREENROOM_HTTP: no such setting"),
        ("sate_dir", "/x", "GREENROOM_SATE_DIR: no such setting; did you mean GREENROOM_STATE"),
        ("http_request_timeout_s", "soon", "http.request_timeout_s='soon'"),
        ("http_keep_alive_timeout_s", "-1", "http.keep_alive_timeout_s='-1'"),
        ("http_header_timeout_s", "0", "http.header_timeout_s='0'"),
        ("http_body_timeout_s", "nan", "http.body_timeout_s='nan'"),
        ("http_send_timeout_s", "0", "http.send_timeout_s='0'"),
        ("http_max_connections_per_client", "0", "http.max_connections_per_client='0'"),
        ("http_max_waiting_body_bytes", "1000", "http.max_waiting_body_bytes='1000'"),
        ("http_max_websocket_message_bytes", "0", "http.max_websocket_message_bytes='0'"),
        ("http_middlewares", "[", "http.middlewares='[': is no JSON"),
        ("num_cpus", "many", "num_cpus='many': must be a valid number"),
        ("num_cpus", "-1", "num_cpus='-1': must be greater than or equal to 0"),
        ("num_gpus", "nan", "num_gpus='nan': must be a finite number"),
        ("num_gpus", "1.5", "num_gpus=1.5: must be a whole number of devices"),
        ("resources", "TPU=0.5", "TPU=0.5: must be a whole number of devices"),
        ("memory", "4GB", "memory='4GB': must be a valid number"),
        ("resources", "disk", "resources='disk': expected names, each once, with amounts"),
        ("resources", "disk=", "resources='disk=': expected names, each once, with amounts"),
        ("resources", "[1]", "resources='[1]': expected names, each once, with amounts"),
        ("resources", "disk=2,disk=3", "resources='disk=2,disk=3': expected names, each once"),
        ("resources", '{"disk": true}', "disk=True: expected a number, 0 or more"),
        ("resources", "disk=-2", "disk='-2': expected a number, 0 or more"),
        ("resources", '{"disk": [2]}', "disk=[2]: expected a number, 0 or more"),
        ("resources", '{"num_cpus": 2}', "num_cpus, num_gpus, memory have settings of their own"),
        ("silence_timeout_s", "-1", "silence_timeout_s='-1': expected 2 seconds or more, or 0"),
        ("silence_timeout_s", "1.9", "silence_timeout_s='1.9': expected 2 seconds or more, or 0"),
        ("silence_timeout_s", "inf", "silence_timeout_s='inf': must be a finite number"),
        ("grpc_port", "0", "grpc_port='0': must be greater than 0"),
        ("grpc_servicer_functions", "add", "[0]='add': must be module.add_XServicer_to_server"),
        ("grpc_servicer_functions", "a.add_b", "grpc_port must be given, too"),
        ("grpc_ssl_ca_certs", "ca.pem", "HTTP must have a certificate"),
        ("grpc_maximum_concurrent_rpcs", "0", "must be greater than or equal to 1"),
        ("log_format", "xml", "log_format='xml': must be 'text' or 'json'"),
        ("log_files", "-1", "log_files='-1': must be greater than or equal to 0"),
        *(
            ("address", address, f"address={address!r}: {address!r} is not HOST:PORT")
            for address in ("host", ":80", "host:", "host:x", "host:0", "host:70000")
        ),
        ("address", "10.0.0.1:1,localhost:2", "localhost:2 is on this host alone"),
        ("host_name", "a#b", "host_name='a#b': expected a name without '#'"),
        *(("host_name", name, "that a folder can have") for name in ("a/b", "/tmp/x", "..", ".")),
        *(
            ("bind", bind, f"bind={bind!r}: expected one IPv4 address of this host")
            for bind in ("0.0.0.0", "host", "10.0.0", "::1", "224.0.0.1", "10.0.0.1:1900")
        ),
        *(
            ("join", join, f"{join!r} is not HOST:PORT of a system that runs")
            for join in ("host", "host:", ":1900", "host:0", "host:70000", "host:x")
        ),
        ("join", "10.0.0.1:1900", "10.0.0.1:1900 is this host itself"),
        ("join", "10.0.0.2:1900,10.0.0.1:1900", "10.0.0.1:1900 is this host itself"),
        ("store", "srv/shared", "store='srv/shared': must be the absolute path of a folder, or"),
        ("store", "mysql://db/x", "store=mysql://...: must be"),
        ("store", "postgresql://me@db/x?sslmod=1", "store=postgresql://me@db/x: must be"),
    ],
)
def test_bad_values_are_refused_naming_the_field_and_the_value(name, value, message):
    with pytest.raises(InvalidRequestError) as caught:
        read_settings({"GREENROOM_BIND": HERE["bind"], variable(name): value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_bad_values_are_named_at_once():
    with pytest.raises(InvalidRequestError, match=r"http\.port='x': .*; log_files='y': "):
        read_settings({}, http_port="x", log_files="y")


@pytest.mark.parametrize("environ", [{}, {"GREENROOM_BIND": "127.0.0.1"}])
def test_only_a_bound_host_can_join(environ):
    with pytest.raises(InvalidRequestError, match="name its address with --bind"):
        read_settings({"GREENROOM_JOIN": "10.0.0.1:1900", **environ})


def test_a_store_is_named_without_its_password():
    store = "postgresql://me:se-cret@db/x"
    for given, found in (
        ({**HERE, "join": "10.0.0.2:1900"}, "leave out --join"),
        ({**HERE, "host_name": "a/b"}, "host_name='a/b'"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            read_settings({"GREENROOM_STORE": store}, **given)
        assert found in str(caught.value)
        assert "se-cret" not in str(caught.value)
    settings = read_settings({"GREENROOM_STORE": store}, **HERE)
    assert settings.may_lead
    assert "se-cret" not in repr(settings)
    (unlike,) = differences(settings, read_settings({}, **HERE).to_environ(), ["store"])
    assert unlike == "store is not set, not postgresql://me@db/x"


def test_a_folder_that_hosts_share_has_the_store_and_nothing_else(tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "own"
    settings = read_settings({}, store=str(shared), state_dir=str(own), **HERE)
    assert settings.may_lead
    assert settings.store_name == settings.store_dir == shared / "store"
    for each in ("run_dir", "logs_dir", "status_file", "host_id_file", "cluster_key"):
        assert getattr(settings, each).is_relative_to(own)


def test_relative_paths_start_in_the_folder_of_the_command():
    settings = read_settings(
        {},
        state_dir="here",
        key_file="key",
        http_ssl_keyfile="../k.pem",
        http_ssl_certfile="c.pem",
        http_middlewares="a:B",
    )
    here = Path.cwd()
    assert (settings.state_dir, settings.key_file) == (here / "here", here / "key")
    assert settings.http.ssl_keyfile == str(here.parent / "k.pem")
    assert settings.http.middlewares_dir == str(here)


def test_the_host_has_what_the_settings_say_or_what_is_found():
    found = capacity_of(read_settings({}))
    assert found["num_cpus"] == len(os.sched_getaffinity(0))
    assert found["memory"] > 1024**2
    assert found["num_gpus"] == 0, "they are counted once, by the host process"
    said = read_settings({}, num_cpus="0.5", num_gpus="2", memory="1e9", resources="disk=2,zone=a")
    expected = {"num_cpus": 0.5, "num_gpus": 2.0, "memory": 1e9, "disk": 2.0}
    assert capacity_of(said) == expected
    assert (said.custom_resources, said.labels) == (
        {"disk": 2},
        {"zone": "a", "greenroom/store": "yes"},
    )
    assert read_settings({}, resources='{"zone": "a", "disk": 2}').resources == said.resources


def fake_smi(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without GPUs, nor limits: ``dev`` and ``nodes`` are in the folder."""
    for name in capacity.LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, attribute in (("dev", "DEVICES"), ("nodes", "KFD_NODES")):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(capacity, attribute, tmp_path / name)
    return tmp_path


def test_gpus_are_counted_by_nvidia_smi_or_by_their_files(monkeypatch, machine):
    for each in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (machine / "dev" / each).touch()
    assert count_gpus() == 3
    fake_smi(machine, "echo 0; echo 1; echo 2; echo 3")
    assert count_gpus() == 4
    for visible, count in (("", 0), ("1", 1), ("0,2", 2), ("0,1,2,3,4", 4), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_gpus() == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    fake_smi(machine, "exit 9")
    assert count_gpus() == 3
    monkeypatch.setattr(capacity, "SMI_TIMEOUT_S", 0.1)
    fake_smi(machine, "exec sleep 60")
    assert count_gpus() == 3


def test_gpus_of_amd_are_counted_as_the_kernel_lists_them(monkeypatch, machine):
    assert count_gpus() == 0
    for number, units in enumerate((0, 0, 304, 304, 1216, 64)):
        folder = machine / "nodes" / str(number)
        folder.mkdir()
        (folder / "properties").write_text(f"cpu_cores_count 96\nsimd_count {units}\nmax_waves 8\n")
    assert count_gpus() == 4
    hidden = machine / "nodes" / "5" / "properties"
    hidden.unlink()
    hidden.mkdir()  # it cannot be read
    assert count_gpus() == 3
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        for visible, count in (("0,2", 2), ("GPU-deadbeefdeadbeef", 1), ("", 0), ("0,1,2,3", 3)):
            monkeypatch.setenv(name, visible)
            assert count_gpus() == count
        monkeypatch.delenv(name)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,2")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert count_gpus() == 1


def test_a_host_that_has_the_clusters_store_says_so_by_a_label():
    alone = HostSettings(resources={"zone": "a", "disk": 1})
    assert alone.labels == {"zone": "a", "greenroom/store": "yes"}
    joined = HostSettings(resources={"zone": "a"}, bind="10.0.0.2", join="10.0.0.1:1900")
    assert joined.labels == {"zone": "a"}
