"""The documents of a release: notes from CHANGELOG.md, bill of materials, checksums; and reasons not to publish it.
Pure: text and data in, text and data out. scripts/release.py reads, writes and starts programs."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement

LICENSE = "Apache-2.0"
# Compiled into libfarandole.so by the cross compiler, whose C++ library is linked statically.
LINKED = ("libc++", "libc++abi", "libunwind", "compiler-rt")
LINKED_LICENSE = "Apache-2.0 WITH LLVM-exception"


@dataclass(frozen=True)
class Section:
    """The part of the changelog about one version. `date` is the text in brackets after the version."""

    version: str
    date: str
    text: str


def sections(changelog: str) -> list[Section]:
    """All versions of a changelog, in its order."""
    found = []
    for block in re.split(r"^## ", changelog, flags=re.M)[1:]:
        title, _, text = block.partition("\n")
        version, _, date = title.strip().partition(" ")
        found.append(Section(version, date.strip("() "), text.strip()))
    return found


def notes(changelog: str, version: str) -> str:
    """The release notes of a version. ValueError says what is missing in the changelog."""
    for section in sections(changelog):
        if section.version == version:
            if not section.text:
                raise ValueError(f"CHANGELOG.md says nothing under `## {version}`: write what changed")
            return section.text + "\n"
    raise ValueError(f"CHANGELOG.md has no section `## {version}`: write one, or correct VERSION")


def refusals(version: str, status: str, tags: Sequence[str], changelog: str) -> list[str]:
    """Why this tree may not be published. `status`: the output of `git status --porcelain`; `tags`: those of HEAD."""
    reasons = []
    if re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version) is None:
        reasons.append(f"VERSION is {version!r}; expected a version such as 1.2.3 or 1.2.3rc1")
    if changed := status.splitlines():
        reasons.append(
            f"{len(changed)} files differ from the last commit, such as {changed[0][3:]}: commit or remove them"
        )
    if f"v{version}" not in tags:
        there = f"its tags are {', '.join(tags)}" if tags else "it has no tag"
        reasons.append(f"the commit is not tagged v{version} ({there}): git tag v{version}")
    try:
        notes(changelog, version)
    except ValueError as error:
        reasons.append(str(error))
    else:
        (date,) = {section.date for section in sections(changelog) if section.version == version}
        if re.fullmatch(r"\d{4}-\d\d-\d\d", date) is None:
            reasons.append(
                f"CHANGELOG.md has `## {version} ({date})`; expected the date of the release, as in (2030-01-31)"
            )
    return reasons


def sums(digests: Mapping[str, str]) -> str:
    """The lines for `sha256sum --check`."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def version_range(requirement: Requirement) -> str:
    """The bounds of a requirement in the notation of CycloneDX.

    >>> version_range(Requirement("numpy<3,>=1.23"))
    'vers:pypi/>=1.23|<3'
    """
    bounds = sorted(requirement.specifier, key=lambda bound: ([int(n) for n in re.findall(r"\d+", bound.version)]))
    written = "|".join(bound.version if bound.operator == "==" else str(bound) for bound in bounds)
    return f"vers:pypi/{written or '*'}"


def dependency(line: str) -> dict[str, Any]:
    """A package that pip installs with ours: always, or only with an extra."""
    requirement = Requirement(line)
    extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
    name = requirement.name.lower()
    part: dict[str, Any] = {"type": "library", "name": requirement.name, "purl": f"pkg:pypi/{name}"}
    part |= {"bom-ref": f"{name} for {extra.group(1)}" if extra else name}
    part |= {"scope": "optional" if extra else "required", "isExternal": True}
    part |= {"versionRange": version_range(requirement)}
    if extra:
        part["properties"] = [{"name": "extra", "value": extra.group(1)}]
    return part


def bill(version: str, when: str, requires: Sequence[str], llvm: str, digests: Mapping[str, str]) -> dict[str, Any]:
    """A bill of materials in CycloneDX 1.7: what pip brings (`requires`, from the wheel's metadata), what is linked
    into the library (of the release `llvm`), and the packages with their SHA-256 (`digests`)."""
    ours = f"pkg:pypi/farandole@{version}"
    outside = {part["bom-ref"]: part for part in map(dependency, requires)}
    linked = [
        {
            "type": "library",
            "bom-ref": name,
            "name": name,
            "version": llvm,
            "scope": "required",
            "description": "linked statically into libfarandole.so of the wheels",
            "licenses": [{"expression": LINKED_LICENSE}],
        }
        for name in LINKED
    ]
    files = [
        {"type": "file", "bom-ref": name, "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}
        for name, digest in sorted(digests.items())
    ]
    main = {
        "type": "library",
        "bom-ref": ours,
        "name": "farandole",
        "version": version,
        "purl": ours,
        "licenses": [{"license": {"id": LICENSE}}],
        "components": files,
    }
    needed = [*outside, *LINKED]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, ours + sums(digests))}",
        "version": 1,
        "metadata": {"timestamp": when, "component": main},
        "components": [*outside.values(), *linked],
        "dependencies": [{"ref": ours, "dependsOn": needed}, *({"ref": name} for name in needed)],
    }
