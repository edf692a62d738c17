"""What the planner moves: alike GPUs of one node, whole or in halves."""

from collections.abc import Sequence
from dataclasses import dataclass

from zorse_ds.core.cluster import Cluster


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """GPUs of one type in one node."""

    node: int
    gpu_type: str
    ranks: tuple[int, ...]

    @property
    def halves(self) -> tuple["Unit", "Unit"]:
        """Two units of half the GPUs each; the first is the larger when there is an odd one."""
        middle = (len(self.ranks) + 1) // 2
        return (
            Unit(self.node, self.gpu_type, self.ranks[:middle]),
            Unit(self.node, self.gpu_type, self.ranks[middle:]),
        )


def units_of(cluster: Cluster) -> tuple[Unit, ...]:
    """All GPUs of the cluster as units, by node and then by their first rank."""
    ranks: dict[tuple[int, str], list[int]] = {}
    for gpu in cluster.gpus:
        ranks.setdefault((gpu.node, gpu.type.name), []).append(gpu.rank)
    return tuple(Unit(node, name, tuple(own)) for (node, name), own in ranks.items())


def joined(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """The units sorted, those of one node and type as one."""
    ranks: dict[tuple[int, str], list[int]] = {}
    for unit in units:
        ranks.setdefault((unit.node, unit.gpu_type), []).extend(unit.ranks)
    whole = (Unit(node, name, tuple(sorted(own))) for (node, name), own in ranks.items())
    return tuple(sorted(whole))


def looks_of(cluster: Cluster) -> tuple[int, ...]:
    """A number for each node; nodes of which only the names differ have the same."""
    known: dict[str, int] = {}
    measured = {end for link in cluster.links for end in link.nodes}
    looks = []
    for index, node in enumerate(cluster.nodes):
        look = str(node.model_dump(exclude={"name"}))
        # A node with measured links is like no other one.
        look += f" {index}" if index in measured else ""
        looks.append(known.setdefault(look, len(known)))
    return tuple(looks)


Signature = tuple[tuple[tuple[int, int, str, int], ...], ...]


def signature_of(groups: Sequence[tuple[Unit, ...]], looks: Sequence[int]) -> Signature:
    """Equal for rows of groups that differ only in which of two alike nodes stands where.

    Each node is named by its look and by when it was first met among those that look so.
    """
    names: dict[int, int] = {}
    met: dict[int, int] = {}
    rows = []
    for group in groups:
        row = []
        for unit in group:
            look = looks[unit.node]
            if unit.node not in names:
                names[unit.node] = met.get(look, 0)
                met[look] = names[unit.node] + 1
            row.append((look, names[unit.node], unit.gpu_type, len(unit.ranks)))
        rows.append(tuple(sorted(row)))
    return tuple(rows)
