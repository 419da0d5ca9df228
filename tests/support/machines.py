"""Bare machines that SSH reaches: network namespaces, each with a real sshd and an own folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.support.balancer import balancer_command
from tests.support.cluster import HTTP_PORT, NETWORK, Cluster
from tests.support.programs import needed
from tests.support.systems import listens, wait_until

UP_TIMEOUT_S = 220  # on a machine with other work
SSHD = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PidFile none
PermitRootLogin yes
"""
SSH = """\
UserKnownHostsFile {folder}/known_hosts
IdentityFile {folder}/key
IdentitiesOnly yes
IdentityAgent none
User root
"""


class Machines:
    """Hosts a, b, c ... of a cluster, and one more, on which commands run."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        *self.hosts, self.operator = cluster.hosts
        self.wait_for = cluster.wait_for
        self.file = folder / "hosts.yaml"
        (folder / "bin").mkdir()
        program = folder / "bin" / "ssh"
        program.write_text(
            f'#!/bin/sh\nexec {needed("ssh", "openssh-client")} -F {folder}/config "$@"\n'
        )
        program.chmod(0o755)
        (folder / "config").write_text(SSH.format(folder=folder))
        for name in ("key", "host_key"):
            made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(made, check=True)
        shutil.copy(folder / "key.pub", folder / "authorized_keys")
        public = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"{NETWORK}.* {public}")
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # sshd's, which Debian's service makes
        for host in self.hosts:
            host.state_dir = self.home(host.label) / "state"
            config = folder / f"sshd_{host.label}"
            config.write_text(SSHD.format(address=host.address, folder=folder))
            command = [needed("sshd", "openssh-server"), "-D", "-e", "-f", str(config)]
            host.call(_begin, command, f"{config}.log")
        for host in self.hosts:
            wait_until(partial(host.call, listens, 22, host.address), 5, f"sshd on {host.label}")

    def home(self, label: str) -> Path:
        """Return the folder that a host has for itself."""
        return self.folder / f"host-{label}"

    def write(self, labels: str, **document: Any) -> None:
        """Write the file with these hosts; of ``hosts``, what else an entry has by label."""
        entries = document.pop("hosts", {})
        hosts = {
            host.label: {
                "address": host.address,
                "dir": str(self.home(host.label)),
                **entries.get(host.label, {}),
            }
            for host in self.hosts
            if host.label in labels
        }
        settings = {"http_host": "0.0.0.0"}
        document = {"settings": settings, **document, "hosts": hosts}
        document = {"wheels": "wheels", "python": sys.executable, **document}
        self.file.write_text(yaml.safe_dump(document, sort_keys=False))

    def balance(self) -> None:
        """Put nginx before the hosts, at the port of the front of the host that has commands."""
        fronts = [f"{host.address}:{HTTP_PORT}" for host in self.hosts]
        log = self.folder / "nginx.log"
        command = balancer_command(self.folder, fronts, str(HTTP_PORT), log)
        self.operator.call(_begin, command, str(log))
        wait_until(partial(self.operator.call, listens, HTTP_PORT), 5, "nginx listens")

    def begin(self, *args: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Begin ``greenroom up`` or ``down`` with the file."""
        verb, *flags = args
        command = [sys.executable, "-m", "greenroom.serve.cli.main", verb, str(self.file), *flags]
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["ip", "netns", "exec", self.operator.name, *command],
            env={**os.environ, "PATH": path, "TMPDIR": str(self.folder), **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, **environ: str) -> tuple[int, str, str]:
        """Run it; return exit code, stdout and stderr."""
        with self.begin(*args, environ=environ) as process:
            out, err = process.communicate(timeout=UP_TIMEOUT_S)
        return process.returncode, out, err

    def check(self, *args: str, **environ: str) -> str:
        """Run it, which must succeed; return stdout."""
        code, out, err = self.run(*args, **environ)
        assert code == 0, f"{args}: {code}\n{out}{err}"
        return out


def _begin(command: list[str], log: str) -> None:
    """Start a program, which ends with its namespace. Called on a host."""
    with open(log, "wb") as file:
        subprocess.Popen(command, stderr=file)
