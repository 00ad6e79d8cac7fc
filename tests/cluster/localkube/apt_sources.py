"""The package sources of this machine: its own lists for its release, in either format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

APT = Path("/etc/apt")
RELEASE = Path("/etc/os-release")


def read_codename(release: Path = RELEASE) -> str:
    """Return the name of this machine's release, for example bookworm."""
    match = re.search(r"(?m)^VERSION_CODENAME=(\w+)$", release.read_text())
    if match is None:
        raise RuntimeError(f"{release} names no release. Next: run this on Debian")
    return match[1]


def read_debian_sources(kind: str = "deb", apt: Path = APT, suite: str = "") -> str:
    """Return the machine's sources of Debian's own packages as deb822 stanzas of `kind` (deb, deb-src).

    Raises RuntimeError if there are none.
    """
    suite = suite or read_codename()
    folder = apt / "sources.list.d"
    stanzas: list[str] = []
    for path in sorted(folder.glob("*.sources")):
        stanzas += _read_stanzas(path.read_text())
    for path in [apt / "sources.list", *sorted(folder.glob("*.list"))]:
        if path.exists():
            stanzas += _read_lines(path.read_text())
    debian_stanzas = [
        re.sub(r"(?m)^Types:.*$", f"Types: {kind}", stanza) for stanza in stanzas if _is_debian(stanza, suite)
    ]
    if not debian_stanzas:
        raise RuntimeError(f"{apt} names no source of Debian's {suite}. Next: add one to {folder}")
    return "\n\n".join(dict.fromkeys(debian_stanzas)) + "\n"


def _read_stanzas(text: str) -> Iterator[str]:
    """Yield the stanzas of a deb822 file for binary packages, without comments."""
    without = re.sub(r"(?m)^#.*\n?", "", text)
    for stanza in re.split(r"\n\s*\n", without):
        if re.search(r"(?m)^Types:.*\bdeb\b", stanza) and not re.search(r"(?mi)^Enabled:\s*no", stanza):
            yield stanza.strip()


def _read_lines(text: str) -> Iterator[str]:
    """Yield the lines of a sources.list for binary packages, as stanzas."""
    for line in text.splitlines():
        match = re.match(r"^\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]+)", line)
        if match is None:
            continue
        options, uri, suite, components = match.groups()
        stanza = [f"Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: {components.strip()}"]
        for option in (options or "").split():
            name, _, value = option.partition("=")
            if name in ("signed-by", "trusted"):
                stanza.append(f"{name.title()}: {value}")
        yield "\n".join(stanza)


def _is_debian(stanza: str, codename: str) -> bool:
    suites = re.search(r"(?m)^Suites:(.*)$", stanza)
    components = re.search(r"(?m)^Components:(.*)$", stanza)
    if suites is None or components is None or "main" not in components[1].split():
        return False
    names = (codename, f"{codename}-updates", f"{codename}-security")
    return any(suite in names for suite in suites[1].split())
