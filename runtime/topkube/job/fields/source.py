"""`spec.source` and `spec.setup` of a TrainingJob: code that is not in the image, and Python packages that it needs."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator

from topkube.job.base.part import Allowed, ObjectName, Part, Path, Uri, declare_rules, raise_problems

MOST_ITEMS = 256
MOST_REQUIREMENTS, LONGEST_REQUIREMENT = 64, 256
ARCHIVE_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst")

RelativePath = Annotated[
    str,
    StringConstraints(max_length=512, pattern=r"^[^/\x00-\x1f\\][^\x00-\x1f\\]*$"),
    Allowed("a relative path without '..'"),
]
_STAYS_INSIDE = declare_rules(
    ("!self.matches('(^|/)[.][.](/|$)')", "leaves the folder of the source: '..' is not allowed")
)
Sha256 = Annotated[
    str,
    StringConstraints(max_length=64, pattern=r"^[0-9a-f]{64}$"),
    Allowed("64 hexadecimal digits in lower case, as sha256sum prints them"),
]
ConfigMapKey = Annotated[
    str,
    StringConstraints(max_length=253, pattern=r"^[-._a-zA-Z0-9]+$"),
    Allowed("a key of the ConfigMap: letters, digits, '-', '_' and '.', at most 253 characters"),
]


def _check_inside(path: str) -> str:
    if ".." in path.split("/"):
        raise ValueError(f"{path!r} leaves the folder of the source: '..' is not allowed")
    return path


class SourceItem(Part):
    """A key of the ConfigMap and the file that it becomes."""

    key: ConfigMapKey = Field(description="key of the ConfigMap")
    path: RelativePath = Field(description="file in the folder of the source", json_schema_extra=_STAYS_INSIDE)

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        return _check_inside(path)


class ConfigMapSource(Part):
    """Code in a ConfigMap of the job's namespace: its keys as files, or an archive in one of its keys."""

    model_config = ConfigDict(
        json_schema_extra=declare_rules(
            ("!has(self.items) || !has(self.archive)", "items has no effect with archive: remove one of the two"),
            ("!has(self.sha256) || has(self.archive)", "sha256 is the checksum of archive: name the archive's key too"),
        )
    )

    name: ObjectName = Field(description="name of the ConfigMap")
    items: Annotated[list[SourceItem], Field(min_length=1, max_length=MOST_ITEMS)] | None = Field(
        default=None, description="keys and their files; by default every key is a file of the same name"
    )
    archive: ConfigMapKey | None = Field(
        default=None,
        description="key that holds a tar archive of the code (`topkube submit --sync` writes it): .tar, .tar.gz, .tgz",
    )
    sha256: Sha256 | None = Field(default=None, description="checksum of the archive; another archive is refused")

    @field_validator("archive")
    @classmethod
    def _check_archive(cls, key: str | None) -> str | None:
        return _check_archive_name(key) if key is not None else None

    @model_validator(mode="after")
    def _check_fields_fit(self) -> ConfigMapSource:
        if self.items is not None and self.archive is not None:
            raise ValueError("items has no effect with archive: remove one of the two")
        if self.sha256 is not None and self.archive is None:
            raise ValueError("sha256 is the checksum of archive: name the archive's key too")
        return self


class ArchiveSource(Part):
    """A tar archive of the code on an object store or a web server."""

    uri: Uri = Field(description="address of a .tar, .tar.gz, .tgz, .tar.zst or .tzst file: s3://…, https://…, …")
    sha256: Sha256 = Field(description="checksum of the archive; another archive is refused")
    secret_name: ObjectName | None = Field(
        default=None,
        description="secret with the credentials of the store; its keys become environment variables of the container "
        "that fetches the archive",
    )

    @field_validator("uri")
    @classmethod
    def _check_uri(cls, uri: str) -> str:
        return _check_archive_name(uri)


class GitSource(Part):
    """A commit of a git repository. The image must have git."""

    url: Annotated[
        str,
        StringConstraints(
            max_length=1024,
            pattern=r"^(https://|ssh://|[A-Za-z0-9_][A-Za-z0-9_.-]*@[A-Za-z0-9][A-Za-z0-9.-]*:)[^\s\x00]+$",
        ),
        Allowed("the address of a repository: https://host/path, ssh://user@host/path or user@host:path"),
    ] = Field(description="address of the repository")
    commit: Annotated[
        str,
        StringConstraints(max_length=64, pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$"),
        Allowed("the full hash of a commit: 40 or 64 hexadecimal digits, as `git rev-parse HEAD` prints it"),
    ] = Field(description="the commit that all workers run, in every attempt")
    ref: Annotated[
        str,
        StringConstraints(max_length=255, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*$"),
        Allowed("a branch or tag: letters, digits, '_', '.', '/' and '-'"),
    ] = Field(
        default="HEAD",
        description="branch or tag that contains the commit. It is fetched if the server does not send single commits",
    )
    secret_name: ObjectName | None = Field(
        default=None,
        description="secret with `username` and `password` (or a token as `password`) for https, or `ssh-privatekey` "
        "and `known_hosts` for ssh",
    )


class Source(Part):
    """The code of the job. Each worker fetches it before it starts, and the ranks run in its folder."""

    model_config = ConfigDict(
        json_schema_extra=declare_rules(
            (
                "[has(self.configMap), has(self.archive), has(self.git)].filter(given, given).size() == 1",
                "needs one of configMap, archive and git",
            )
        )
    )

    config_map: ConfigMapSource | None = Field(default=None, description="code in a ConfigMap, up to 1 MiB")
    archive: ArchiveSource | None = Field(
        default=None, description="code in an archive on an object store or over HTTP"
    )
    git: GitSource | None = Field(default=None, description="code in a git repository; the image must have git")

    @model_validator(mode="after")
    def _check_one_source(self) -> Source:
        if [self.config_map, self.archive, self.git].count(None) != 2:
            raise ValueError("needs one of configMap, archive and git")
        return self


class Setup(Part):
    """Python packages that each worker's pod installs before it starts."""

    requirements: Annotated[
        list[
            Annotated[
                str,
                StringConstraints(max_length=LONGEST_REQUIREMENT, pattern=r"^[A-Za-z0-9][^\x00-\x1f]*$"),
                Allowed(f"a requirement of pip, such as einops==0.8.0, at most {LONGEST_REQUIREMENT} characters"),
            ]
        ],
        Field(min_length=1, max_length=MOST_REQUIREMENTS),
    ] = Field(description="requirements, as in pip's requirements.txt but without options")
    wheels: (
        Annotated[
            str,
            StringConstraints(max_length=512, pattern=r"^[^\x00-\x1f\\-][^\x00-\x1f\\]*$"),
            Allowed("a folder: an absolute path in the worker's container, or a path in the folder of the source"),
        ]
        | None
    ) = Field(
        default=None,
        description="folder with wheels of all packages: pip reads it and uses no network. An absolute path in the "
        "worker's container, or a path in the folder of the source",
    )

    @field_validator("requirements")
    @classmethod
    def _refuse_options(cls, requirements: list[str]) -> list[str]:
        problems: list[tuple[Path, str]] = []
        for index, line in enumerate(requirements):
            if re.search(r"\s--?[A-Za-z]", line):
                problems.append(((index,), f"{line!r} contains an option of pip: options are not allowed"))
        raise_problems(problems)
        return requirements


def _check_archive_name(name: str) -> str:
    if not name.endswith(ARCHIVE_ENDINGS):
        raise ValueError(f"{name!r} is not an archive: it must end in {', '.join(ARCHIVE_ENDINGS)}")
    return name
