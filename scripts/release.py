"""Build what a release publishes into dist/, and test it as a user gets it. `make release` runs this; docs/release.md
explains it.

    python scripts/release.py [--registry REGISTRY] [--tag TAG] [--output dist] [--skip-smoke-test]

A release has the sdist, a wheel that is built from this sdist and repaired for manylinux, the chart as an archive, an
SBOM (CycloneDX), and checksums. Then the wheel is installed from wheels alone, without a compiler, and trains. The
chart's archive is rendered for the oldest and the newest Kubernetes, and pushed to and pulled from an OCI registry.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
TOOLS = Path(__file__).with_name("release-requirements.txt")
KUBERNETES = ("1.20.2", "1.25.0", "1.36.0")
"""The versions for which the chart is checked: the oldest, the first with CEL rules, and the newest."""
CHECKSUMS = "SHA256SUMS"
REGISTRY_PROGRAM = "docker-registry"
"""The program of a registry. Debian's package has the same name."""
REGISTRY_SECONDS = 60.0
"""How long the registry may take to start."""


def main() -> None:
    parser = argparse.ArgumentParser("release", description="Build a release into dist/ and test it.")
    parser.add_argument("--registry", help="registry and folder of the images (default: [tool.topkube.release])")
    parser.add_argument("--tag", help="the tag that is released, for example v0.1.0; it must be the version")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="(%(default)s)")
    parser.add_argument("--skip-smoke-test", action="store_true", help="build only")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version = check_version(project, options.tag)
    registry = options.registry or project["tool"]["topkube"]["release"]["registry"]
    output = options.output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="topkube-release-") as name:
        folder = Path(name)
        say("installing the tools")
        tools = create_environment(folder / "tools", "-r", str(TOOLS))
        say("building the sdist and, from it, the wheel")
        sdist = build_sdist(tools, output)
        wheel = build_wheel(tools, sdist, folder, output)
        say("packing the chart")
        chart = pack_chart(tools, registry, version, folder, output)
        say("installing the wheel without a compiler")
        clean = install_wheel(wheel, folder / "clean")
        write_sbom(tools, clean, output / f"topkube-{version}.cdx.json")
        if not options.skip_smoke_test:
            say("testing what is installed")
            train_with_wheel(clean, folder / "run")
            check_chart(tools, chart, registry, version)
            push_and_pull_chart(tools, chart, folder / "registry")
    write_checksums(output)
    for path in sorted(output.iterdir()):
        print(f"  {path.stat().st_size:>12,}  {path.relative_to(output.parent)}")


def check_version(project: dict[str, Any], tag: str | None) -> str:
    """Return the version. Every place that states it, and the tag, must agree."""
    version = str(project["project"]["version"])
    places = {
        "runtime/topkube/__init__.py": f'__version__ = "{version}"',
        "charts/topkube/Chart.yaml": f"version: {version}\nappVersion: {version}",
        "manifests/operator.yaml": f"image: topkube/operator:{version}",
        "manifests/node-cache/agent.yaml": f"image: topkube/operator:{version}",
    }
    for path, text in places.items():
        if text not in (ROOT / path).read_text():
            fail(f"{path} does not state the version {version}", f"make it contain: {text!r}")
    if tag is not None and tag != f"v{version}":
        fail(f"the tag is {tag}, but pyproject.toml has version {version}", f"git tag v{version}")
    return version


def build_sdist(tools: Path, output: Path) -> Path:
    run(tools / "python", "-m", "build", "--sdist", "--outdir", output, ROOT)
    (sdist,) = output.glob("*.tar.gz")
    return sdist


def build_wheel(tools: Path, sdist: Path, folder: Path, output: Path) -> Path:
    """Build the wheel from the sdist, so that the sdist is complete. Give it the oldest manylinux tag that fits."""
    # The wheel is for every machine, so it has no CUDA kernels, even if this machine has nvcc.
    build = [tools / "python", "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder / "wheel", sdist]
    run(*build, environment={"TOPKUBE_CUDA": "off"})
    (built,) = (folder / "wheel").glob("*.whl")
    repair = [tools / "python", "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", output, built]
    run(*repair, environment={"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"})  # it calls patchelf
    (wheel,) = output.glob("*.whl")
    if "manylinux" not in wheel.name:
        fail(f"{wheel.name} is for this machine only", "read the output of auditwheel above")
    return wheel


def pack_chart(tools: Path, registry: str, version: str, folder: Path, output: Path) -> Path:
    """Pack the chart, with the files that its links name, and with the images of `registry`."""
    chart = folder / "chart" / "topkube"
    shutil.copytree(ROOT / "charts" / "topkube", chart, symlinks=False)
    values = chart / "values.yaml"
    text = values.read_text()
    before, after = "repository: topkube/operator", f"repository: {registry}/operator"
    if before not in text:
        fail(f"charts/topkube/values.yaml does not contain {before!r}", "correct pack_chart in scripts/release.py")
    values.write_text(text.replace(before, after))
    code = "import sys, helm_python; print(helm_python.package(sys.argv[1], destination=sys.argv[2]))"
    run(tools / "python", "-c", code, chart, output)
    archive = output / f"topkube-{version}.tgz"
    with tarfile.open(archive) as members:
        links = [member.name for member in members if not (member.isfile() or member.isdir())]
        names = set(members.getnames())
    if links:
        fail(f"{archive.name} contains links: {links}", "correct pack_chart in scripts/release.py")
    for name in ("crd.yaml", "crd-1.25.yaml", "crd-cached-datasets.yaml"):
        if f"topkube/files/{name}" not in names:
            fail(f"{archive.name} lacks files/{name}", "correct pack_chart in scripts/release.py")
    return archive


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Install the wheel with an MPI and torch from wheels alone, as on a machine without a compiler."""
    constraints = ["-c", str(ROOT / "constraints.txt")]  # torch's build for CPUs
    return create_environment(
        folder, "--only-binary", ":all:", *constraints, f"{wheel}[mpich,train,operator,tensorboard,safetensors]"
    )


def train_with_wheel(clean: Path, folder: Path) -> None:
    """Run the installed commands, in a folder without the sources and with no compiler in the PATH."""
    folder.mkdir()
    without_compiler = {"PATH": str(clean), "PYTHONPATH": "", "CC": "false", "CXX": "false"}
    run(clean / "topkube", "--version", environment=without_compiler, folder=folder)
    words = (
        "-m topkube.examples.char_gpt --workers 2 --slots 2 --algorithm hitopk --log tensorboard --run-directory out"
    )
    sizes = "-- --steps 3 --layers 1 --width 32 --context 16"
    run(clean / "topkube", "run", *words.split(), *sizes.split(), environment=without_compiler, folder=folder)
    if not list(folder.glob("out/logs/tensorboard/*")):
        fail("the run wrote no event file", f"read the logs in {folder}/out")
    run(clean / "topkube-operator", "--help", environment=without_compiler, folder=folder, quiet=True)


def check_chart(tools: Path, archive: Path, registry: str, version: str) -> None:
    """Check the chart's archive for each version of Kubernetes as `helm lint` does, and render it as `helm template`
    does."""
    code = """
import sys, yaml, helm_python as helm
archive, registry, version, *kubernetes = sys.argv[1:]
for number in kubernetes:
    errors = helm.lint(archive, strict=True, kube_version=f"v{number}")["errors"]
    assert not errors, (number, errors)
with helm.Chart.load(archive) as chart:
    files = chart.render({}, name="topkube", namespace="topkube-system")
texts = [text for path, text in files.items() if path.endswith(".yaml")]
objects = [item for text in texts for item in yaml.safe_load_all(text) if item]
kinds = [item["kind"] for item in objects]
assert kinds.count("CustomResourceDefinition") == 2, kinds
(operator,) = (item for item in objects if item["kind"] == "Deployment")
(container,) = operator["spec"]["template"]["spec"]["containers"]
assert container["image"] == f"{registry}/operator:{version}", container["image"]
print(f"chart: {len(objects)} objects; correct for Kubernetes {', '.join(kubernetes)}")
"""
    run(tools / "python", "-c", code, archive, registry, version, *KUBERNETES)


def push_and_pull_chart(tools: Path, archive: Path, folder: Path) -> None:
    """Push the chart as an OCI artefact to a registry on loopback, and pull it again. Without the program of a
    registry, print that this was not tested."""
    program = shutil.which(REGISTRY_PROGRAM)
    if program is None:
        say(f"not tested: the chart as an OCI artefact. Next: apt-get install {REGISTRY_PROGRAM}, then make release")
        return
    code = """
import sys, helm_python as helm
archive, address, name, folder = sys.argv[1:]
helm.push(archive, f"oci://{address}/charts", plain_http=True)
helm.pull(f"oci://{address}/charts/{name}", destination=folder, plain_http=True)
"""
    folder.mkdir()
    with serve_registry(program, folder) as address:
        run(tools / "python", "-c", code, archive, address, "topkube", folder, quiet=True)
    if (folder / archive.name).read_bytes() != archive.read_bytes():
        fail("the registry returned another chart than was pushed", "try the commands of docs/release.md by hand")
    print("chart: pushed to an OCI registry and pulled again, with equal bytes")


@contextlib.contextmanager
def serve_registry(program: str, folder: Path) -> Iterator[str]:
    """Run a registry on loopback, with its data in `folder`. Yields its address, HOST:PORT."""
    with socket.socket() as probe:  # a free port
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "config.yaml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\nhttp: {{addr: '{address}'}}\n"
    )
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
    try:
        end = time.monotonic() + REGISTRY_SECONDS
        while not _is_answering(address):
            if process.poll() is not None or time.monotonic() > end:
                log_text = (folder / "registry.log").read_text(errors="replace")
                fail(f"{program} does not answer on {address}: {log_text[-500:]}", f"{program} serve {config}")
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait()


def _is_answering(address: str) -> bool:
    host, _, port = address.partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def write_sbom(tools: Path, clean: Path, path: Path) -> None:
    """Write the SBOM of everything that the wheel installs, in CycloneDX's JSON."""
    run(
        *(tools / "cyclonedx-py", "environment", clean / "python", "--pyproject", ROOT / "pyproject.toml"),
        *("--output-reproducible", "--output-format", "JSON", "--output-file", path),
    )


def write_checksums(output: Path) -> None:
    """Write the file that `sha256sum --check` reads."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(output.iterdir())]
    (output / CHECKSUMS).write_text("".join(lines))


def create_environment(folder: Path, *requirements: str) -> Path:
    """Create a virtual environment with `requirements`. Return the folder of its programs."""
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements)
    return folder / "bin"


def run(*command: object, environment: dict[str, str] | None = None, folder: Path = ROOT, quiet: bool = False) -> None:
    words = [str(word) for word in command]
    output = subprocess.DEVNULL if quiet else None
    ended = subprocess.run(words, cwd=folder, env={**os.environ, **(environment or {})}, check=False, stdout=output)
    if ended.returncode:
        fail(f"{' '.join(words[:6])} … ended with exit code {ended.returncode}", "read its output above")


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def fail(what: str, next_step: str) -> NoReturn:
    print(f"release: {what}.\nNext: {next_step}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
