"""What is installed and present on this machine, for `zorse doctor`."""

import os
from dataclasses import dataclass
from importlib import metadata

import torch
from packaging.requirements import Requirement

from zorse_ds.core.gpus import type_of_device


@dataclass(frozen=True)
class Library:
    """A library that the package needs."""

    name: str
    version: str | None
    """What is installed, or None."""
    expected: str
    """The range that was tested."""
    is_tested: bool


@dataclass(frozen=True)
class Device:
    """A GPU of this machine, or its CPUs where it has none."""

    name: str
    gpu_type: str | None
    """Its name in the catalogue, or None."""
    memory_bytes: int | None
    has_bf16: bool


def libraries() -> tuple[Library, ...]:
    """The libraries that the package requires, in its order; none when it is not installed."""
    try:
        texts = metadata.requires("zorse_ds") or []
    except metadata.PackageNotFoundError:
        return ()
    requirements = [Requirement(text) for text in texts]
    return tuple(_library(each) for each in requirements if each.marker is None)


def devices() -> tuple[Device, ...]:
    """The GPUs of this machine (not run yet: no GPU was at hand), or else its CPUs."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = [(each.name, each.total_memory, each.major >= 8) for each in found]
    if not gpus:
        return (Device(f"{os.cpu_count()} CPU cores", None, None, has_bf16=True),)
    return tuple(_gpu(*each) for each in gpus)


def _gpu(name: str, memory_bytes: int, has_bf16: bool) -> Device:
    kind = type_of_device(name)
    return Device(name, None if kind is None else kind.name, memory_bytes, has_bf16)


def _library(requirement: Requirement) -> Library:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Library(requirement.name, None, str(requirement.specifier), is_tested=False)
    is_tested = requirement.specifier.contains(version, prereleases=True)
    return Library(requirement.name, version, str(requirement.specifier), is_tested)
