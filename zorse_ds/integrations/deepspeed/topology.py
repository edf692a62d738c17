"""What DeepSpeed asks of a topology and a grid, answered for a ragged plan.

DeepSpeed sees a rectangle of width one: `stages × 1`. So its batch arithmetic and its averages
become identities, and the plan alone says who does what.
"""

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from zorse_ds.core.plan import Plan
from zorse_ds.runtime.dist_world import DistWorld


class ZorseTopology:
    """Duck type of DeepSpeed's `ProcessTopology`: one axis, `pipe`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def get_dim(self, axis: str) -> int:
        return len(self._plan.stages) if axis == "pipe" else 1

    def get_coord(self, rank: int) -> Any:
        return SimpleNamespace(pipe=self._plan.stages_of_rank(rank)[0], data=0)

    def get_axis_names(self) -> list[str]:
        return ["pipe"]

    def get_rank_repr(self, rank: int, **_: Any) -> str:
        return ""

    def world_size(self) -> int:
        return self._plan.world_size

    def __str__(self) -> str:
        return f"ragged plan: {len(self._plan.stages)} stages over {self._plan.world_size} ranks"


class ZorseGrid:
    """Duck type of DeepSpeed's `PipelineParallelGrid` (its mpu)."""

    def __init__(self, process_group: Any = None, topology: ZorseTopology | None = None) -> None:
        assert topology is not None, "a ragged grid is made from the topology of a plan"
        self._topo = topology
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.stage_id = topology.get_coord(self.global_rank).pipe
        self.pipe_parallel_size = topology.get_dim("pipe")
        self.data_parallel_id = 0
        self.data_parallel_size = 1
        self.model_parallel_size = 1
        self.slice_parallel_size = 1
        self.pp_group = list(range(self.world_size))
        self.dp_group = [self.global_rank]
        self.p2p_groups: list[list[int]] = []
        self._world: DistWorld | None = None

    def attach(self, world: DistWorld, group_ranks: tuple[int, ...]) -> None:
        """Give the grid the process groups that the engine made."""
        self._world = world
        self.dp_group = list(group_ranks)

    def topology(self) -> ZorseTopology:
        return self._topo

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        return self.stage_id

    def stage_to_global(self, stage_id: int, **_: Any) -> int:
        """The lowest rank that hosts a stage."""
        coords = (self._topo.get_coord(rank).pipe for rank in range(self.world_size))
        return list(coords).index(stage_id)

    def get_data_parallel_group(self) -> Any:
        """The ranks that run the same stages."""
        assert self._world is not None, "the engine attaches the process groups"
        return self._world.handle(self.dp_group)

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    def get_pipe_parallel_group(self) -> Any:
        """Every rank has a part in the pipeline."""
        assert self._world is not None, "the engine attaches the process groups"
        return self._world.world.handle

    get_model_parallel_group = get_pipe_parallel_group
    get_slice_parallel_group = get_data_parallel_group
    get_tensor_model_parallel_group = get_data_parallel_group

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def _one(self) -> int:
        return 1

    def _zero(self) -> int:
        return 0

    get_data_parallel_world_size = _one
    get_model_parallel_world_size = _one
    get_slice_parallel_world_size = _one
    get_tensor_model_parallel_world_size = _one
    get_data_parallel_rank = _zero
    get_data_parallel_id = _zero
    get_model_parallel_rank = _zero
    get_slice_parallel_rank = _zero
    get_tensor_model_parallel_rank = _zero
