"""deploy/kubernetes: it follows Kubernetes' own schemas, and fits Greenroom and the image."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from greenroom.actors.runtime.settings import FIELDS, read_settings, variable
from greenroom.core.config import HTTPOptions
from tests.support.container import ROOT, instruction

FOLDER = ROOT / "deploy" / "kubernetes"
OLDEST, NEWEST = "1.27", "1.37"
NAME = {"app.kubernetes.io/name": "greenroom"}


def _documents() -> dict[tuple[str, str], dict[str, Any]]:
    """Return what kustomize would render, by kind and name."""
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == sorted(os.listdir(FOLDER))
    found = [each for name in listed for each in yaml.safe_load_all((FOLDER / name).read_text())]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


ALL = _documents()
SET = ALL["StatefulSet", "greenroom"]["spec"]
POD = SET["template"]["spec"]
(CONTAINER,) = POD["containers"]
VARIABLES = {each["name"] for each in CONTAINER["env"]}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("which", ALL, ids="-".join)
def test_a_resource_follows_the_schema(which: tuple[str, str], version: str) -> None:
    if which[0] == "ServiceMonitor":
        pytest.skip("a resource of the Prometheus operator, which has no schema there")
    kubernetes_validate.validate(ALL[which], version, strict=True)


def test_the_schemas_refuse_what_is_misspelt() -> None:
    wrong = {**ALL["Service", "greenroom"], "spec": {"selectr": NAME}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_kustomize_renders_it() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl")
    rendered = subprocess.run(
        [kubectl, "kustomize", str(FOLDER)], check=True, capture_output=True, text=True
    ).stdout
    found = list(yaml.safe_load_all(rendered))
    assert {(each["kind"], each["metadata"]["name"]) for each in found} == set(ALL)
    outside = [each for each in found if each["metadata"].get("namespace") != "greenroom"]
    assert [each["kind"] for each in outside] == ["Namespace"]


def test_the_settings_are_settings() -> None:
    given = ALL["ConfigMap", "greenroom"]["data"]
    assert set(given) | VARIABLES <= {variable(name) for name in FIELDS}
    assert not set(given) & VARIABLES
    settings = read_settings(
        {
            **given,
            "GREENROOM_HOST_NAME": "greenroom-1",
            "GREENROOM_BIND": "10.0.0.2",
            "GREENROOM_JOIN": "greenroom-0.greenroom-hosts:1900",
            "GREENROOM_KEY_FILE": "/tmp/cluster.key",
            "GREENROOM_NUM_CPUS": "2",
            "GREENROOM_MEMORY": str(2 * 1024**3),
        }
    )
    assert settings.gates == ("greenroom-0.greenroom-hosts:1900",)


def test_services_probes_and_budgets_select_the_pods_and_their_ports() -> None:
    ports = {each["name"]: each["containerPort"] for each in CONTAINER["ports"]}
    assert ports == {"http": HTTPOptions().port, "hosts": read_settings({}).admin_port}
    assert SET["template"]["metadata"]["labels"] == NAME == SET["selector"]["matchLabels"]
    for (kind, name), each in ALL.items():
        if kind == "Service":
            assert each["spec"]["selector"] == NAME
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= set(ports), name
    assert SET["serviceName"] in {name for kind, name in ALL if kind == "Service"}
    assert ALL["PodDisruptionBudget", "greenroom"]["spec"]["selector"]["matchLabels"] == NAME
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = CONTAINER[probe]["httpGet"]
        assert get["path"] in ("/-/healthz", "/-/readyz")
        assert get["port"] == "http"
    monitor = ALL["ServiceMonitor", "greenroom"]["spec"]
    client = ALL["Service", "greenroom"]
    assert monitor["selector"]["matchLabels"] == client["metadata"]["labels"]
    assert {each["port"] for each in monitor["endpoints"]} == {
        each["name"] for each in client["spec"]["ports"]
    }


def test_the_pod_is_what_the_image_is_made_for() -> None:
    context = POD["securityContext"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == instruction("USER")
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    mounts = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert mounts["state"] == instruction("VOLUME")
    assert mounts["tmp"] == "/tmp"
    # Kubernetes' own variables for services would look like settings.
    assert POD["enableServiceLinks"] is False


@pytest.mark.parametrize(
    ("pod", "join"),
    [
        ("greenroom-0", ""),
        ("greenroom-1", "greenroom-0.greenroom-hosts:1900"),
        ("greenroom-10", "greenroom-0.greenroom-hosts:1900"),
    ],
)
def test_the_first_pod_leads_and_the_others_join_it(tmp_path: Path, pod: str, join: str) -> None:
    (tmp_path / "greenroom").write_text(
        '#!/bin/sh\necho "$GREENROOM_JOIN" "$@"; stat -c %a cluster.key\n'
    )
    (tmp_path / "greenroom").chmod(0o755)
    (tmp_path / "given.key").write_text("a key")
    (tmp_path / "given.key").chmod(0o440)
    (script,) = CONTAINER["args"]
    script = script.replace("/run/secrets/greenroom/cluster.key", "given.key")
    script = script.replace("/tmp/cluster.key", "cluster.key")
    done = subprocess.run(
        [*CONTAINER["command"], script],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "GREENROOM_HOST_NAME": pod},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [*join.split(), "start", "--block", "400"]
