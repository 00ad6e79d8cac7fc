"""The programs of a cluster: Debian's packages, and Kubernetes compiled from Debian's source package."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localkube.apt_sources import read_debian_sources
from localkube.daemons import run

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
TO_RUN = (
    "etcd-server", "containerd", "runc", "containernetworking-plugins", "iptables", "iproute2", "conntrack", "buildah",
    "mmdebstrap", "gcc", "libc6-dev", "procps", "git", "ca-certificates",
)  # fmt: skip
TO_BUILD = ("golang-go", "golang-github-modern-go-reflect2-dev", "rsync", "jq", "make", "dpkg-dev", "libc6-dev", "gcc")


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock on `path` during the `with` block. If the process dies, the lock is released."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install_packages(*packages: str) -> None:
    """Install the Debian packages that are missing."""
    listing = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages], capture_output=True, text=True
    )
    present = {line.split()[0] for line in listing.stdout.splitlines() if line.endswith(" installed")}
    missing = [package for package in packages if package not in present]
    if missing:
        print(f"installing {' '.join(missing)}", flush=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "-qq", env=environment)
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, env=environment)


def compile_kubernetes(cache: Path) -> Path:
    """Return the folder with Kubernetes' programs. They are compiled once, in 4 to 8 minutes on 2 cores, and kept in
    `cache`."""
    cache = cache / "kubernetes"
    with hold_lock(cache / "lock"):
        for folder in sorted(cache.glob("v*")):
            if all((folder / program).exists() for program in PROGRAMS):
                return folder
        install_packages(*TO_BUILD)
        with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as scratch:
            version, binaries = _compile_source(Path(scratch))
            folder = cache / f"v{version}"
            shutil.rmtree(folder, ignore_errors=True)
            binaries.rename(folder)
        return folder


def _compile_source(scratch: Path) -> tuple[str, Path]:
    """Fetch Debian's source of Kubernetes and compile it. Return its version and the folder of the programs."""
    # Source packages are added to a copy of this machine's list. The machine's own list does not change.
    lists = scratch / "lists"
    (lists / "partial").mkdir(parents=True)
    (scratch / "source.sources").write_text(read_debian_sources("deb-src"))
    options = [
        f"-oDir::Etc::sourcelist={scratch / 'source.sources'}",
        "-oDir::Etc::sourceparts=/dev/null",
        f"-oDir::State::lists={lists}",
        "-oAPT::Sandbox::User=root",
    ]
    run("apt-get", *options, "update", "-qq")
    run(
        "sh",
        "-c",
        'cd "$0" && exec "$@"',
        scratch,
        "apt-get",
        *options,
        "source",
        "--download-only",
        "-qq",
        "kubernetes",
    )
    description = next(scratch.glob("kubernetes_*.dsc"))
    version = re.search(r"(\d+\.\d+\.\d+)-[^_]*\.dsc$", description.name.replace("really", ""))
    if version is None:
        raise RuntimeError(f"no version in the name of Debian's source package, {description.name}")
    source = scratch / "src"
    run("dpkg-source", "-x", description, source)
    print(f"compiling Kubernetes {version[1]} from Debian's source package (4 to 8 minutes)", flush=True)

    # The vendored reflect2 1.0.1 corrupts iterations over maps with Go 1.18 and newer. Debian has a corrected package.
    fixed = Path("/usr/share/gocode/src/github.com/modern-go/reflect2")
    shutil.rmtree(source / "vendor/github.com/modern-go/reflect2")
    shutil.copytree(fixed, source / "vendor/github.com/modern-go/reflect2")

    # Kubernetes 1.20 can be built only inside a GOPATH.
    path = source / ".go/src/k8s.io/kubernetes"
    path.parent.mkdir(parents=True)
    path.symlink_to(source)
    environment = {
        **os.environ,
        "GOPATH": str(source / ".go"), "GOCACHE": str(scratch / "objects"), "GO111MODULE": "off", "CGO_ENABLED": "0",
        "GOFLAGS": "", "PWD": str(path),
    }  # fmt: skip
    inside = ("sh", "-c", 'cd "$0" && exec "$@"', path)
    stamp = (f"KUBE_GIT_VERSION=v{version[1]}", "KUBE_GIT_TREE_STATE=clean", "KUBE_GIT_COMMIT=debian")
    run(*inside, "make", "generated_files", *stamp, env=environment)
    major, minor, _ = version[1].split(".")
    flags = ["-s", "-w"]
    for package in ("component-base/version", "client-go/pkg/version"):
        path_of_package = f"k8s.io/kubernetes/vendor/k8s.io/{package}"
        for name, value in (("gitVersion", f"v{version[1]}"), ("gitMajor", major), ("gitMinor", minor)):
            flags.append(f"-X {path_of_package}.{name}={value}")
    programs = [f"k8s.io/kubernetes/cmd/{program}" for program in PROGRAMS]
    binaries = scratch / "programs"
    binaries.mkdir()
    run(*inside, "go", "build", "-ldflags", " ".join(flags), "-o", f"{binaries}/", *programs, env=environment)
    return version[1], binaries
