"""Replicas go where they fit; what does not fit waits and says for what."""

from __future__ import annotations

import json

import pytest

from tests.support.cluster import Cluster
from tests.support.systems import wait_until

pytestmark = pytest.mark.slow

GPU = """
from greenroom import serve

@serve.deployment(num_replicas=2, ray_actor_options={"resources": {"gpu": 1}})
class Gpu:
    def __call__(self, request):
        return "gpu"

@serve.deployment(max_replicas_per_host=1, num_replicas=2,
                  ray_actor_options={"label_selector": {"zone": "b"}})
class Zone:
    def __init__(self, gpu):
        self.gpu = gpu

    def __call__(self, request):
        return "zone"

app = Zone.bind(Gpu.bind())
"""
MISSING = """
import onlyhere
from greenroom import serve

@serve.deployment(num_replicas=2)
class User:
    def __call__(self, request):
        return onlyhere.WORD

app = User.bind()
"""
GIVEN = """
from greenroom import serve

@serve.deployment(num_replicas=6)
class Given:
    def __call__(self, request):
        import words
        return words.WORD

app = Given.bind()
"""


def test_resources_and_labels_decide_and_a_host_that_joins_takes_what_waits(
    three: Cluster,
) -> None:
    a, b, c = three.hosts
    a.start()
    b.start("--resources", "gpu=1,zone=b")
    (three.folder / "gpu.py").write_text(GPU)
    a.call(_begin_deploy, a.environ, str(three.folder))

    def waits() -> bool:
        messages = json.dumps(a.status().get("applications"))
        return (
            "host a: a replica needs 1 gpu, and the host has 0 gpu in all" in messages
            and "host b: it has 1 of its replicas already" in messages
            and "a replica needs zone=b, and it has no zone" in messages
        )

    three.wait_for(waits, 20, "it says what is missing")
    three.wait_for(
        lambda: list(a.replicas("default#Gpu").values()) == ["b"], 20, "one fits, and runs"
    )
    c.start("--resources", "gpu=1,zone=b")
    three.wait_for(
        lambda: a.status()["applications"]["default"]["status"] == "RUNNING", 20, "all fits"
    )
    assert sorted(a.replicas("default#Gpu").values()) == ["b", "c"]
    assert sorted(a.replicas("default#Zone").values()) == ["b", "c"]
    # By another host's replica, as soon as a's router knows of it: the deploy is not waited for.
    three.wait_for(lambda: a.get("/") == (200, "zone"), 10, "it is served here")
    shown = {host["name"]: host for host in b.status()["hosts"]}
    assert shown["c"]["labels"] == {"zone": "b"}
    assert shown["c"]["resources"]["gpu"] == {"total": 1, "taken": 1}


def _begin_deploy(environ: dict[str, str], folder: str) -> None:
    import os  # noqa: PLC0415  # on the host
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    command = [sys.executable, "-m", "greenroom.serve.cli.main", "deploy", "gpu:app"]
    subprocess.Popen(  # it waits; ended with its host
        [*command, "--app-dir", folder],
        env={**os.environ, **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_a_module_that_a_host_has_not_fails_the_deploy_naming_both(three: Cluster) -> None:
    a, b, _ = three.hosts
    installed = three.folder.with_name(f"{three.folder.name}-installed")
    here = installed / "site-packages"  # what is installed does not travel
    here.mkdir(parents=True)
    (here / "onlyhere.py").write_text("WORD = 'here'")
    a.start(PYTHONPATH=str(here))
    b.start(PYTHONPATH="")
    (three.folder / "user.py").write_text(MISSING)
    deploy = ("deploy", "user:app", "--app-dir", str(three.folder))
    code, _, err = a.run(*deploy, PYTHONPATH=str(here))
    assert code == 1
    told = "cannot be unpickled on host 'b': ModuleNotFoundError: No module named 'onlyhere'"
    assert told in err
    application = a.status()["applications"]["default"]
    assert application["status"] == "DEPLOY_FAILED"
    assert told in application["message"]
    wait_until(lambda: not a.replicas("default#User", "STARTING"), 10, "it is given up")


def test_a_folder_reaches_every_host_once_and_a_module_it_lacks_is_named_with_the_host(
    three: Cluster,
) -> None:
    project = three.folder / "project"
    project.mkdir()
    (project / "words.py").write_text("WORD = 'from the folder'")
    (project / "given.py").write_text(GIVEN)
    three.start(PYTHONPATH="")
    a, b, c = three.hosts
    deploy = ("deploy", "given:app", "--working-dir", str(project))
    b.check(*deploy)
    for host in three.hosts:
        assert host.get("/") == (200, "from the folder")
        (unpacked,) = [p for p in (host.state_dir / "folders").iterdir() if p.is_dir()]
        assert (unpacked / "words.py").read_text() == "WORD = 'from the folder'"
    assert sorted(a.replicas("default#Given").values()) == ["a", "a", "b", "b", "c", "c"]
    assert a.log("controller.log").count("sending folder") == 3
    here = three.folder.with_name(f"{three.folder.name}-installed")
    here.mkdir()
    (here / "onlyhere.py").write_text("WORD = 'here'")
    uses_it = GIVEN.replace("words.WORD", "onlyhere.WORD")
    (project / "given.py").write_text("import onlyhere\n" + uses_it)
    code, _, err = c.run(*deploy, PYTHONPATH=str(here))
    assert code == 1
    assert "ModuleNotFoundError: No module named 'onlyhere'" in err
    assert "on host '" in err
    assert a.get("/") == (200, "from the folder")  # the earlier version serves on
