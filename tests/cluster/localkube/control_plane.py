"""etcd and the three programs of the control plane, on the machine itself."""

from __future__ import annotations

from pathlib import Path

from localkube.certificates import ClusterAuthority
from localkube.cgroups import Group
from localkube.daemons import Daemon, run, wait_until
from localkube.layout import Layout

# A node without a heartbeat for this time is lost. Heartbeats come every 4 s (node.py).
NODE_GRACE = "16s"


class ControlPlane:
    """etcd, kube-apiserver, kube-controller-manager and kube-scheduler of `layout`, programs in folder `programs`."""

    def __init__(self, layout: Layout, programs: Path) -> None:
        self.layout = layout
        self.programs = programs
        state, keys = layout.state, layout.state / "pki"
        clients, peers = (f"http://127.0.0.1:{port}" for port in layout.etcd_ports)
        self.etcd = self._build_daemon(
            "etcd", "/usr/bin/etcd", f"--data-dir={state / 'etcd'}", "--unsafe-no-fsync", "--log-level=warn",
            f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )  # fmt: skip
        self.api_server = self._build_daemon(
            "apiserver", programs / "kube-apiserver",
            f"--etcd-servers={clients}", f"--secure-port={layout.api_port}", "--bind-address=0.0.0.0",
            f"--advertise-address={layout.gateway}", f"--service-cluster-ip-range={layout.service_range}",
            f"--tls-cert-file={keys / 'apiserver.crt'}", f"--tls-private-key-file={keys / 'apiserver.key'}",
            f"--client-ca-file={keys / 'ca.crt'}", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={keys / 'sa.pub'}", f"--service-account-signing-key-file={keys / 'sa.key'}",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP", f"--kubelet-certificate-authority={keys / 'ca.crt'}",
            f"--kubelet-client-certificate={keys / 'admin.crt'}", f"--kubelet-client-key={keys / 'admin.key'}",
            # webhooks are called at their pods: no kube-proxy runs on the machine itself
            "--enable-aggregator-routing=true",
            "--profiling=false",
        )  # fmt: skip
        kubeconfig = f"--kubeconfig={layout.kubeconfig}"
        self.controller_manager = self._build_daemon(
            "controller-manager", programs / "kube-controller-manager", kubeconfig, "--leader-elect=false",
            f"--root-ca-file={keys / 'ca.crt'}", f"--service-account-private-key-file={keys / 'sa.key'}",
            f"--node-monitor-grace-period={NODE_GRACE}", "--node-monitor-period=2s", "--pod-eviction-timeout=10s",
            "--kube-api-qps=200", "--kube-api-burst=400", "--concurrent-gc-syncs=10", "--port=0",
            f"--secure-port={layout.controller_manager_port}", "--bind-address=127.0.0.1", "--profiling=false",
        )  # fmt: skip
        self.scheduler = self._build_daemon(
            "scheduler", programs / "kube-scheduler", kubeconfig, "--leader-elect=false",
            "--kube-api-qps=200", "--kube-api-burst=400", "--port=0",
            f"--secure-port={layout.scheduler_port}", "--bind-address=127.0.0.1", "--profiling=false",
        )  # fmt: skip
        self.daemons = (self.etcd, self.api_server, self.controller_manager, self.scheduler)

    def _build_daemon(self, name: str, *command: str | Path) -> Daemon:
        log = self.layout.state / "logs" / f"{name}.log"
        return Daemon(name, Group(self.layout.name) / "control" / name, log, command)

    def start(self) -> ClusterAuthority:
        """Create keys and start all programs. Return when the API server is ready."""
        layout = self.layout
        authority = ClusterAuthority.create(layout.state / "pki")
        service = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
        names = ("localhost", *service, "127.0.0.1", layout.kubernetes_service, layout.gateway)
        authority.issue("apiserver", "kube-apiserver", names=names)
        authority.issue("admin", "admin", organization="system:masters")
        authority.write_kubeconfig(layout.kubeconfig, f"https://127.0.0.1:{layout.api_port}", "admin")
        authority.write_kubeconfig(layout.state / "proxy.conf", f"https://{layout.gateway}:{layout.api_port}", "admin")
        self.etcd.start()
        self.api_server.start()
        self.wait_ready()
        self.controller_manager.start()
        self.scheduler.start()
        return authority

    def is_ready(self) -> bool:
        command = [self.programs / "kubectl", f"--kubeconfig={self.layout.kubeconfig}", "get", "--raw", "/readyz"]
        return run(*command, check=False) == "ok"

    def wait_ready(self, seconds: float = 300.0) -> None:
        try:
            wait_until(self.is_ready, "the API server to be ready", seconds, interval=0.2)
        except TimeoutError as error:
            daemon = self.api_server if self.etcd.is_alive() else self.etcd
            raise TimeoutError(f"{error}. The end of the log of {daemon.name}:\n{daemon.read_log_tail()}") from None

    def restart_api_server(self) -> None:
        """Kill the API server with SIGKILL and start it again. Return when it is ready."""
        self.api_server.restart()
        self.wait_ready()
