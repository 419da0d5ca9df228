"""The file of `greenroom up` is read with errors that name line, value and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.core.errors import InvalidRequestError
from greenroom.serve.up.hosts_file import HostsFile
from tests.support.wheels import write_wheel

TWO = """
wheels: wheels
dir: /srv/greenroom
settings: {http_host: 0.0.0.0}
hosts:
  one: {address: 10.0.0.1, ssh: admin@one.example}
  two:
    address: 10.0.0.2
    python: /opt/python/bin/python3
    settings: {resources: "gpu=2", http_port: 8001}
"""


@pytest.fixture(name="folder")
def make_folder(tmp_path):
    write_wheel(tmp_path / "wheels", "greenroom", "0.2.0", "")
    write_wheel(tmp_path / "wheels", "parrot", "1.0", "")
    return tmp_path


def read(folder: Path, text: str) -> HostsFile:
    (folder / "hosts.yaml").write_text(text)
    return HostsFile(folder / "hosts.yaml")


def test_hosts_get_their_place_and_the_settings_of_all(folder):
    one, two = read(folder, TWO).hosts.values()
    assert one.target == ("one", "admin@one.example", "/srv/greenroom", "python3")
    assert two.target == ("two", "10.0.0.2", "/srv/greenroom", "/opt/python/bin/python3")
    assert one.environ == {
        "GREENROOM_HTTP_HOST": "0.0.0.0",
        "GREENROOM_BIND": "10.0.0.1",
        "GREENROOM_HOST_NAME": "one",
    }
    assert two.environ == {
        "GREENROOM_HTTP_HOST": "0.0.0.0",
        "GREENROOM_RESOURCES": "gpu=2",
        "GREENROOM_HTTP_PORT": "8001",
        "GREENROOM_BIND": "10.0.0.2",
        "GREENROOM_JOIN": "10.0.0.1:1900",
        "GREENROOM_HOST_NAME": "two",
    }


def test_a_setting_without_a_value_is_that_of_a_host_alone(folder):
    text = TWO.replace("http_host: 0.0.0.0", "http_host: 0.0.0.0, admin_port: ")
    one, two = read(folder, text.replace("http_port: 8001", "http_host: null")).hosts.values()
    assert "GREENROOM_ADMIN_PORT" not in one.environ, "rather than null"
    assert "GREENROOM_HTTP_HOST" not in two.environ
    assert two.environ["GREENROOM_JOIN"] == "10.0.0.1:1900"


def test_another_gate_of_the_leader_is_what_the_others_join_by(folder):
    text = TWO.replace(
        "ssh: admin@one.example", "settings: {advertise: 192.0.2.1, admin_port: 1901}"
    )
    assert read(folder, text).hosts["two"].environ["GREENROOM_JOIN"] == "192.0.2.1:1901"


def test_hosts_with_a_store_lead_and_the_others_join_all_of_them(folder):
    hosts = read(
        folder,
        """
wheels: wheels
hosts:
  one: {address: 10.0.0.1, settings: {store: /shared, admin_port: 1901}}
  two: {address: 10.0.0.2, settings: {store: /shared}}
  three: {address: 10.0.0.3}
""",
    ).hosts
    assert [host.environ.get("GREENROOM_JOIN") for host in hosts.values()] == [
        None,
        None,
        "10.0.0.1:1901,10.0.0.2:1900",
    ]


def test_a_generation_is_of_wheels_python_and_settings(folder):
    one, two = read(folder, TWO).hosts.values()
    assert one.generation.startswith(f"{one.release}-")
    assert one.release.startswith("0.2.0-")
    assert one.release != two.release
    other = read(folder, TWO.replace("8001", "8002")).hosts["two"]
    assert (other.release == two.release, other.generation == two.generation) == (True, False)
    write_wheel(folder / "wheels", "parrot", "1.0", "another = True")
    assert read(folder, TWO).hosts["one"].release != one.release


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: {}", "hosts.yaml:1:1: hosts: .*at least 1"),
        ("hosts: {a: 3}", r"hosts.a=3: must be a valid dictionary$"),
        ("hosts: {1: {address: 10.0.0.1}}", r"hosts\[1\]=1: must be a valid string$"),
        ("hosts: {a: {address: 10.0.0.1}}\ndeploy: 3", "deploy=3: must be a path$"),
        ("hosts: {a: {}}", r"hosts.yaml:1:9: hosts.a.address: must be given"),
        ("hosts: {a: {address: x}}", r"hosts.yaml:2:9: hosts.a: bind='x': expected one IPv4"),
        ("hosts: {a: {address: 10.0.0.1, user: me}}", "no such setting; write ssh: USER@HOST"),
        ("hosts: {a: {address: 10.0.0.1, settings: {bind: x}}}", "bind follows from the rest"),
        (
            "hosts: {a: {address: 10.0.0.1, settings: {http_prot: 1}}}",
            "http_prot: no such setting; did",
        ),
        (
            "hosts: {a: {address: 10.0.0.1, settings: {http: {port: 1}}}}",
            "hosts.yaml:2:32: hosts.a.settings: http: no such setting; they are the flags",
        ),
        (
            "hosts: {a: {address: 10.0.0.1}, b: {address: 10.0.0.2, ssh: 10.0.0.1}}",
            "hosts.b: is at 10.0.0.1 in ~/greenroom, as 'a' is; name another machine, or another",
        ),
        ("hosts: {a: {address: 10.0.0.1}}\ndeploy: no.yaml", "deploy: there is no file .*no.yaml"),
        (
            "hosts: {a: {address: 10.0.0.1}}\ndeploy: hosts.yaml\napp_dir: wheels",
            "is not below app_dir",
        ),
        ("hosts: {a: {address: '${ADDRESS_OF_A}'}}", "the variable ADDRESS_OF_A is not set"),
    ],
)
def test_a_bad_file_is_refused_with_what_to_do(folder, text, message):
    with pytest.raises(InvalidRequestError, match=message):
        read(folder, f"wheels: wheels\n{text}" if "hosts.yaml:1" not in message else
             f"{text}\nwheels: wheels")  # fmt: skip


def test_wheels_are_one_release_whole(folder):
    with pytest.raises(InvalidRequestError, match=r"no folder .*none; make them by `pip wheel"):
        assert read(folder, TWO.replace("wheels: wheels", "wheels: none")).wheels
    write_wheel(folder / "wheels", "parrot", "2.0", "")
    with pytest.raises(InvalidRequestError, match=r"has parrot in 1\.0, 2\.0; keep one"):
        assert read(folder, TWO).wheels
    (folder / "wheels" / "thespian-4.0.1.tar.gz").touch()
    with pytest.raises(InvalidRequestError, match=r"thespian-4.0.1.tar.gz is no wheel; make them"):
        assert read(folder, TWO).wheels
    for path in (folder / "wheels").glob("[gt]*"):
        path.unlink()
    (folder / "wheels" / "parrot-2.0-py3-none-any.whl").unlink()
    with pytest.raises(InvalidRequestError, match="no wheel of greenroom"):
        assert read(folder, TWO).wheels
