"""Where a cluster comes from: a JSON file, a hostfile, or the examples in the package."""

from functools import cache
from importlib import resources
from pathlib import Path

from zorse_ds.core.cluster import Cluster
from zorse_ds.core.hostfile import load_hostfile
from zorse_ds.core.strict import suggestion
from zorse_ds.errors import ClusterError
from zorse_ds.files import parse_json


@cache
def example_clusters() -> tuple[str, ...]:
    """Names of the clusters that ship with the package."""
    folder = resources.files("zorse_ds.core").joinpath("clusters")
    files = (Path(entry.name) for entry in folder.iterdir())
    return tuple(sorted(file.stem for file in files if file.suffix == ".json"))


def cluster_from(source: str | Path) -> Cluster:
    """The cluster of a JSON file or hostfile at `source`, or else the example of that name.

    Raises `ClusterError`, each sentence with the path.
    """
    path = Path(source)
    if not path.exists():
        return _example(str(source))
    return Cluster.load(path) if path.suffix == ".json" or _is_object(path) else load_hostfile(path)


def _is_object(path: Path) -> bool:
    """Whether a file starts as a JSON object does."""
    if not path.is_file():
        return True
    with path.open("rb") as file:
        return file.read(1024).lstrip().startswith(b"{")


def _example(name: str) -> Cluster:
    if name not in example_clusters():
        known = ", ".join(example_clusters())
        raise ClusterError(
            f"{name} is no file and no example cluster; expected a cluster's JSON file, a hostfile "
            f"with gpu_type=, or one of {known}{suggestion(name, example_clusters())}"
        )
    file = resources.files("zorse_ds.core").joinpath("clusters", f"{name}.json")
    return Cluster.from_dict(parse_json(file.read_text("utf-8"), name, ClusterError))
