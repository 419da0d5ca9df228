"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.programs import needed

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    """PEM files."""

    certificate: Path
    key: Path
    ca: Path


def _openssl(*arguments: object) -> None:
    subprocess.run([needed("openssl"), *map(str, arguments)], check=True, capture_output=True)


def certificate(folder: Path, name: str) -> Certificate:
    """Make a certificate, and its authority at the first use."""
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    if not ca.exists():
        # Python 3.13 and newer refuse an authority that does not say that it may sign.
        subject = ("-subj", "/CN=ca", "-days", 30, "-addext", "keyUsage=critical,keyCertSign")
        _openssl("req", "-x509", *_KEY, *subject, "-keyout", ca_key, "-out", ca)
    request, key, made = (folder / f"{name}.{end}" for end in ("csr", "key", "pem"))
    _openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
    _openssl(
        *("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key),
        *("-CAcreateserial", "-days", 30, "-out", made),
    )
    return Certificate(made, key, ca)
