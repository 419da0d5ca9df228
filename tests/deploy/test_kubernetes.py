"""deploy/kubernetes*: they follow Kubernetes' own schemas, and fit Greenroom and the image."""

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import kubernetes_validate
import pytest

from greenroom.actors.runtime.settings import FIELDS, read_settings, variable
from greenroom.core.config import HTTPOptions
from tests.support.container import instruction
from tests.support.kubernetes import FOLDERS, command_of, environment_of, rendered

OLDEST, NEWEST = "1.27", "1.37"
NAME = {"app.kubernetes.io/name": "greenroom"}
ALL = rendered("kubernetes")
SET = ALL["StatefulSet", "greenroom"]["spec"]
POD = SET["template"]["spec"]
(CONTAINER,) = POD["containers"]
SECRETS = {"greenroom-store": {"uri": "postgresql://greenroom:se%40cret@db/greenroom"}}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("folder", FOLDERS)
def test_resources_follow_the_schemas(folder, version):
    for (kind, _), each in rendered(folder).items():
        if kind != "ServiceMonitor":  # of the Prometheus operator, which has no schema there
            kubernetes_validate.validate(each, version, strict=True)


def test_the_schemas_refuse_what_is_misspelt():
    wrong = {**ALL["Service", "greenroom"], "spec": {"selectr": NAME}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_settings_are_settings(folder):
    documents = rendered(folder)
    given = environment_of(documents, name="greenroom-1", ip="10.0.0.2", secrets=SECRETS)
    assert set(given) <= {variable(name) for name in FIELDS}
    settings = read_settings(given)
    if folder == "kubernetes":
        assert settings.store is None
        joined = read_settings({**given, "GREENROOM_JOIN": "greenroom-0.greenroom-hosts:1900"})
        assert joined.gates == ("greenroom-0.greenroom-hosts:1900",)
    else:
        assert settings.store == SECRETS["greenroom-store"]["uri"]
        assert "se%40cret" not in repr(settings)


def test_with_a_database_no_volume_is_kept_and_no_pod_is_special():
    (spec,) = (
        each["spec"]
        for (kind, _), each in rendered("kubernetes-postgres").items()
        if kind == "StatefulSet"
    )
    assert "volumeClaimTemplates" not in spec
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["state"] == {"name": "state", "emptyDir": {}}
    assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
    assert "JOIN" not in container["args"][0]


def test_services_probes_and_budgets_select_the_pods_and_their_ports():
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


def test_the_pod_is_what_the_image_is_made_for():
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
def test_the_first_pod_leads_and_the_others_join_it(pod, join):
    user = int(instruction("USER").partition(":")[0])
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "greenroom").write_text(
            '#!/bin/sh\necho "$GREENROOM_JOIN" "$@"; stat -c %a cluster.key\n'
        )
        (folder / "greenroom").chmod(0o755)
        (folder / "given.key").write_text("a key")
        (folder / "given.key").chmod(0o444)
        if os.geteuid() == 0:
            os.chown(folder, user, user)
        for _ in range(2):  # a container that is started again has the /tmp of before
            done = subprocess.run(
                command_of(ALL, key="given.key", tmp="cluster.key"),
                env={"PATH": f"{name}:{os.environ['PATH']}", "GREENROOM_HOST_NAME": pod},
                cwd=name,
                check=True,
                capture_output=True,
                text=True,
                user=user if os.geteuid() == 0 else None,
            )
            assert done.stdout.split() == [*join.split(), "start", "--block", "400"]
