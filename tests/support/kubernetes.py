"""The resources of deploy/kubernetes*, rendered as kustomize does, as far as they need it."""

from __future__ import annotations

import os
from typing import Any

import yaml

from tests.support.container import ROOT

FOLDERS = ("kubernetes", "kubernetes-postgres")
Documents = dict[tuple[str, str], dict[str, Any]]


def rendered(folder: str) -> Documents:
    """Return the resources of a folder of deploy/, by kind and name."""
    path = ROOT / "deploy" / folder
    report = yaml.safe_load((path / "kustomization.yaml").read_text())
    files = [name for name in report["resources"] if name.endswith(".yaml")]
    assert sorted([*files, "kustomization.yaml"]) == sorted(os.listdir(path))
    found: Documents = {}
    for base in (name for name in report["resources"] if name not in files):
        found |= rendered(os.path.relpath(path / base, ROOT / "deploy"))
    for name in files:
        for each in yaml.safe_load_all((path / name).read_text()):
            found[each["kind"], each["metadata"]["name"]] = each
    for each in report.get("patches", ()):
        patch = yaml.safe_load(each["patch"])
        which = (patch["kind"], patch["metadata"]["name"])
        found[which] = _patched(found[which], patch)
    return found


def _patched(value: Any, patch: Any) -> Any:
    """Return a value after a strategic merge: by key, and lists of what has names by name."""
    if isinstance(value, dict) and isinstance(patch, dict):
        merged = {**value, **{name: _patched(value.get(name), x) for name, x in patch.items()}}
        return {name: x for name, x in merged.items() if x is not None}
    if isinstance(patch, list) and all("name" in x for x in patch):
        by_name = {x["name"]: x for x in value}
        return list(_patched(by_name, {x["name"]: x for x in patch}).values())
    return patch


def environment_of(
    documents: Documents, *, name: str, ip: str, secrets: dict[str, dict[str, str]]
) -> dict[str, str]:
    """Return the variables of a pod's container, as the kubelet sets them."""
    pod = documents["StatefulSet", "greenroom"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    fields = {"metadata.name": name, "status.podIP": ip}
    limits = {"limits.cpu": "2", "limits.memory": str(2 * 1024**3)}
    environ = {}
    for source in container["envFrom"]:
        environ |= documents["ConfigMap", source["configMapRef"]["name"]]["data"]
    for each in container["env"]:
        source = each.get("valueFrom", {})
        if "fieldRef" in source:
            environ[each["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "resourceFieldRef" in source:
            environ[each["name"]] = limits[source["resourceFieldRef"]["resource"]]
        elif "secretKeyRef" in source:
            secret = source["secretKeyRef"]
            environ[each["name"]] = secrets[secret["name"]][secret["key"]]
        else:
            environ[each["name"]] = each["value"]
    return environ


def command_of(documents: Documents, **paths: str) -> list[str]:
    """Return what the container runs, with other paths in place of ``key`` and ``tmp``."""
    (container,) = documents["StatefulSet", "greenroom"]["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    script = script.replace("/run/secrets/greenroom/cluster.key", paths["key"])
    return [*container["command"], script.replace("/tmp/cluster.key", paths["tmp"])]
