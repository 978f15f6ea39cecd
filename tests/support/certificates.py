"""Certificates of TLS servers that tests start."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.ports import free_port


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Create a key and a certificate for 127.0.0.1."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl: apt-get install openssl")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    name = ("-subj", "/CN=bus", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(key), "-out", str(certificate))
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name, *files]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return key, certificate


def tls_settings(folder: Path) -> tuple[tuple[str, ...], int, Path]:
    """Return settings of a Redis server with a self-signed certificate, its TLS port, and the certificate."""
    (key, certificate), port = self_signed(folder), free_port()
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate))
    return ("--tls-port", str(port), "--tls-auth-clients", "no", *files), port, certificate
