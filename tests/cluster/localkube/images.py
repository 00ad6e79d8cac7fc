"""TopKube's images: built with buildah, stored unpacked in one containerd, and copied to nodes within about a second.

Building: mmdebstrap makes a local base image with the name that the Dockerfiles use. The wheel is built outside of the
image and copied in, so that a change of TopKube's source changes only two small layers. A digest of the sources is
stored with each image. If the sources are unchanged, the image is not built again.

Copying to nodes: layers are large (torch), and nodes share a disk. A *seed* is the root folder of a containerd that has
the unpacked images. The root of a new node has hard links to all files of the seed (layers are never written to), and
copies of its databases. This takes a second instead of half a minute, no space on the disk, and one copy in the page
cache. A node that already runs gets only the layers that it lacks.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from localkube.apt_sources import read_debian_sources
from localkube.daemons import run
from localkube.packages import hold_lock

REPOSITORY = Path(__file__).resolve().parents[3]
BASE = "docker.io/library/debian:bookworm-slim"
PAUSE = "localhost/pause:1"
PAUSE_SOURCE = """\
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int signal_number) { _exit(signal_number == SIGTERM || signal_number == SIGINT ? 0 : 1); }
static void collect(int signal_number) { (void)signal_number; while (waitpid(-1, 0, WNOHANG) > 0) continue; }
int main(void) {
  signal(SIGTERM, end); signal(SIGINT, end); signal(SIGCHLD, collect);
  for (;;) pause();
}
"""


@dataclass(frozen=True)
class Image:
    """An image that is built from `dockerfile` with `arguments`. `name` is the name in pods."""

    name: str
    dockerfile: str
    arguments: tuple[str, ...] = ()

    def with_tag(self, tag: str) -> Image:
        """Return the same image with another tag."""
        return replace(self, name=f"{self.name.rpartition(':')[0]}:{tag}")

    @property
    def full_name(self) -> str:
        return f"docker.io/{self.name}"

    @property
    def archive(self) -> str:
        """The name of the image's folder in the cache."""
        return self.name.replace("/", "-").replace(":", "-")


VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
TAG = os.environ.get("TOPKUBE_TEST_TAG") or VERSION
"""Two checkouts that test at the same time have different tags for their images."""
SMALL = "EXTRAS="  # no test of a cluster needs the libraries of object stores, which every node would hold
RUNTIME = Image(f"topkube/runtime:{TAG}", "images/runtime/Dockerfile", (SMALL,))
RUNTIME_OPENMPI = Image(f"topkube/runtime:{TAG}-openmpi", "images/runtime/Dockerfile", ("MPI=openmpi", SMALL))
OPERATOR = Image(f"topkube/operator:{TAG}", "images/operator/Dockerfile")


def _compute_digest(*parts: bytes | str) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
    return total.hexdigest()


def _read_dependencies(pyproject: Path) -> str:
    """Return the part of pyproject.toml that an image installs. The layer is rebuilt only if this part changes."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name != "dev"}
    lines = [f"[project]\ndependencies = {json.dumps(project['dependencies'])}", "[project.optional-dependencies]"]
    return "\n".join([*lines, *(f"{name} = {json.dumps(needed)}" for name, needed in extras.items())]) + "\n"


def _read_torch_requirement(sources: Path) -> str:
    """Return the requirement that pins torch, from constraints.txt."""
    lines = (sources / "constraints.txt").read_text().splitlines()
    return next(line.strip() for line in lines if line.startswith("torch"))


class Store:
    """The images in `cache`, built from `sources`: layers (`layouts`), buildah's own storage, and the seed of nodes."""

    def __init__(self, cache: Path, sources: Path = REPOSITORY) -> None:
        self.sources = sources
        self.folder = cache / "images"
        self.layouts = self.folder / "layouts"
        self.seed = self.folder / "seed"
        self.wheels = self.folder / "wheels"

    # -- building

    def build(self, images: Iterable[Image]) -> list[Image]:
        """Build the images that are not up to date with the sources of this repository. Return these images."""
        with hold_lock(self.folder / "lock"):
            return [image for image in images if self._build_image(image)]

    def build_pause(self) -> None:
        """Build the pause image: a static program that waits and keeps a pod's namespaces."""
        with hold_lock(self.folder / "lock"):
            scratch = self.layouts / "pause"
            if self._read_recipe(scratch) == _compute_digest(PAUSE_SOURCE):
                return
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            run("gcc", "-Os", "-static", "-x", "c", "-o", scratch / "pause", "-", stdin=PAUSE_SOURCE)
            (scratch / "Dockerfile").write_text('FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n')
            self._run_buildah("bud", "-q", "--isolation", "chroot", "-t", PAUSE, scratch)
            self._export_image(PAUSE, scratch, _compute_digest(PAUSE_SOURCE))

    def _build_image(self, image: Image) -> bool:
        wheel = self._build_wheel()
        context = self.folder / "context"
        shutil.rmtree(context, ignore_errors=True)
        (context / "dist").mkdir(parents=True)
        (context / "images").mkdir()
        (context / "pyproject.toml").write_text(_read_dependencies(self.sources / "pyproject.toml"))
        shutil.copy2(self.sources / "images/requirements.py", context / "images")
        shutil.copy2(wheel, context / "dist")
        for path in (context / "pyproject.toml", context / "images/requirements.py"):
            os.utime(path, (0, 0))
        dockerfile = self.sources / image.dockerfile
        arguments = list(image.arguments)
        if "ARG TORCH" in dockerfile.read_text():
            arguments.append(f"TORCH={_read_torch_requirement(self.sources)}")
        recipe = _compute_digest(
            dockerfile.read_bytes(), (context / "pyproject.toml").read_bytes(), wheel.name, wheel.parent.name,
            (context / "images/requirements.py").read_bytes(), *arguments,
        )  # fmt: skip
        layout = self.layouts / image.archive
        if self._read_recipe(layout) == recipe:
            return False
        self._build_base()
        print(f"building {image.name}", flush=True)
        options: list[str | Path] = []
        for name, inside, value in _read_pip_configuration():
            options += ["--build-arg", f"{name}={inside}"]
            options += ["-v", f"{value}:{inside}:ro"] if value is not None else []
        for argument in arguments:
            options += ["--build-arg", argument]
        self._run_buildah(
            "bud", "-q", "--isolation", "chroot", "--pull-never", "--layers", "-f", dockerfile, "-t", image.full_name,
            *options, context,
        )  # fmt: skip
        self._export_image(image.full_name, layout, recipe)
        return True

    def _build_wheel(self) -> Path:
        """Build TopKube's wheel from these sources, without CUDA, unless it exists. Return its path."""
        names = run(
            "git",
            "-c",
            f"safe.directory={self.sources}",  # whoever owns it
            "-C",
            self.sources,
            "ls-files",
            "-co",
            "--exclude-standard",
            "csrc",
            "runtime",
            "operator",
            "pyproject.toml",
            "README.md",
            "LICENSE",
        )
        files = [self.sources / name for name in sorted(set(names.splitlines()))]
        source = _compute_digest(*(f"{file}\n".encode() + file.read_bytes() for file in files if file.is_file()))
        folder = self.wheels / source[:16]
        wheels = list(folder.glob("*.whl"))
        if not wheels:
            for old in sorted(self.wheels.glob("*"), key=lambda path: path.stat().st_mtime)[:-4]:
                shutil.rmtree(old)
            print("building TopKube's wheel", flush=True)
            objects = self.sources / "build" / "images"  # kept, so that a change of Python code compiles nothing
            settings = (f"--config-settings=build-dir={objects}", "--config-settings=cmake.define.TOPKUBE_CUDA=off")
            run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *settings, "-w", folder, self.sources)
            wheels = list(folder.glob("*.whl"))
        return wheels[0]

    def _build_base(self) -> None:
        """Build the image debian:bookworm-slim from Debian's packages, unless it exists."""
        if self._run_buildah("images", "-q", BASE, check=False).strip():
            return
        print("making a local debian:bookworm-slim", flush=True)
        archive = self.folder / "base.tar"
        slim = [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "info", "locale", "lintian")]
        run("mmdebstrap", "--quiet", "--variant=minbase", *slim, "bookworm", archive, "-", stdin=read_debian_sources())
        container = self._run_buildah("from", "scratch").strip()
        self._run_buildah("add", "-q", container, archive, "/")
        self._run_buildah("commit", "-q", "--rm", container, BASE)
        archive.unlink()

    def _run_buildah(self, *arguments: str | Path, check: bool = True) -> str:
        return run(
            "buildah",
            "--root",
            self.folder / "buildah",
            "--runroot",
            self.folder / "buildah-run",
            *arguments,
            check=check,
        )

    def _export_image(self, name: str, layout: Path, recipe: str) -> None:
        """Write the image's manifest and layers, not compressed, to `layout`."""
        shutil.rmtree(layout, ignore_errors=True)
        layout.parent.mkdir(parents=True, exist_ok=True)
        self._run_buildah("push", "-q", "-D", "-f", "oci", name, f"dir:{layout}")
        (layout / "name").write_text(name)
        (layout / "recipe").write_text(recipe)

    @staticmethod
    def _read_recipe(layout: Path) -> str:
        return (layout / "recipe").read_text() if (layout / "recipe").exists() else ""

    # -- on nodes

    def load(self, containerd: Path, images: Iterable[Image]) -> None:
        """Import images, and the pause image, into the containerd with this socket. Send only the layers that it
        lacks."""
        for layout in self._list_layouts(images):
            manifest = (layout / "manifest.json").read_bytes()
            if _has_image(containerd, layout, manifest):
                continue
            try:
                _import_image(
                    containerd, layout, manifest, present=set(_run_ctr(containerd, "content", "ls", "-q").split())
                )
            except RuntimeError:
                # containerd's garbage collection may have removed layers that only a former image of this name used.
                _import_image(containerd, layout, manifest, present=set())

    def _list_layouts(self, images: Iterable[Image]) -> list[Path]:
        return [self.layouts / "pause", *(self.layouts / image.archive for image in images)]

    def plant_seed(self, root: Path) -> None:
        """Make `root` the root folder of a containerd that has the images, by hard links to the seed if there is
        one."""
        if not (self.seed / "fingerprint").exists():
            return
        if os.stat(self.seed).st_dev != os.stat(root.parent).st_dev:
            run("cp", "-a", f"{self.seed}/root", root)
            return
        run("cp", "-al", f"{self.seed}/root", root)
        for database in (self.seed / "root").rglob("*.db"):  # written to in place
            copy = root / database.relative_to(self.seed / "root")
            copy.unlink()
            shutil.copy2(database, copy)

    def grow_seed(self, images: Iterable[Image], containerd_at: Callable[[Path], AbstractContextManager[Path]]) -> None:
        """Bring the seed up to date with `images`. `containerd_at(root)` runs a containerd on `root` and yields its
        socket."""
        fingerprint = _compute_digest(*(self._read_recipe(layout) for layout in self._list_layouts(images)))
        fingerprint_file = self.seed / "fingerprint"
        with hold_lock(self.folder / "lock"):
            if fingerprint_file.exists() and fingerprint_file.read_text() == fingerprint:
                return
            fingerprint_file.unlink(missing_ok=True)
            self.seed.mkdir(parents=True, exist_ok=True)
            with containerd_at(self.seed / "root") as socket:
                self.load(socket, images)
            fingerprint_file.write_text(fingerprint)


def _read_pip_configuration() -> Iterator[tuple[str, str, str | None]]:
    """Return the configuration of pip on this machine: (build argument, its value in the build, file or folder mounted
    there)."""
    listing = run(sys.executable, "-m", "pip", "config", "list")
    settings = dict(line.split("=", 1) for line in listing.splitlines() if "=" in line)
    values = {name.rsplit(".", 1)[-1]: value.strip("'\"") for name, value in settings.items()}
    certificates = os.environ.get("PIP_CERT") or values.get("cert")
    if certificates:
        yield "PIP_CERT", "/run/pip/certificates", os.path.realpath(certificates)
    links = os.environ.get("PIP_FIND_LINKS") or values.get("find-links")
    if links and Path(links).is_dir():
        yield "PIP_FIND_LINKS", "/run/pip/wheels", links


def _run_ctr(socket: Path, *arguments: str | Path, stdin: bytes | None = None, check: bool = True) -> str:
    return run("ctr", "-a", socket, "-n", "k8s.io", *arguments, stdin=stdin, check=check)


def _has_image(socket: Path, layout: Path, manifest: bytes) -> bool:
    """Return True if the containerd has exactly this image under its name, complete and unpacked. An import that was
    interrupted leaves the name without its layers."""
    table = _run_ctr(socket, "images", "check", f"name=={(layout / 'name').read_text()}", check=False)
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    return any(digest in line and " complete " in line and line.split()[-1] == "true" for line in table.splitlines())


def _import_image(socket: Path, layout: Path, manifest: bytes, present: set[str]) -> None:
    """Import one image, an OCI archive, without the layers in `present`."""
    parsed = json.loads(manifest)
    blobs = [parsed["config"]["digest"], *(layer["digest"] for layer in parsed["layers"])]
    reference = {
        "mediaType": parsed.get("mediaType", "application/vnd.oci.image.manifest.v1+json"),
        "digest": f"sha256:{hashlib.sha256(manifest).hexdigest()}",
        "size": len(manifest),
        "annotations": {
            "io.containerd.image.name": (layout / "name").read_text(),
            "org.opencontainers.image.ref.name": (layout / "name").read_text(),
        },
    }
    index = json.dumps({"schemaVersion": 2, "manifests": [reference]}).encode()
    command = ["ctr", "-a", str(socket), "-n", "k8s.io", "images", "import", "-"]
    importing = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert importing.stdin is not None
    assert importing.stdout is not None
    try:
        with tarfile.open(fileobj=importing.stdin, mode="w|") as archive:
            for name, content in (
                ("oci-layout", b'{"imageLayoutVersion": "1.0.0"}'),
                ("index.json", index),
                (f"blobs/sha256/{reference['digest'][7:]}", manifest),
            ):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
            for blob in dict.fromkeys(blobs):
                if blob not in present:
                    archive.add(layout / blob[7:], f"blobs/sha256/{blob[7:]}")
        importing.stdin.close()
    except BrokenPipeError:  # containerd's output, below, names the cause
        pass
    words = importing.stdout.read().decode(errors="replace")
    if importing.wait():
        raise RuntimeError(f"containerd did not import the image {(layout / 'name').read_text()}: {words.strip()}")
