"""The param groups a user gave, seen as options and membership."""

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter

from zorse_ds.runtime.assembly import ParamGroups


def param_groups_of(parameters: Iterable[Any]) -> ParamGroups:
    """Groups out of parameters or of dicts with `params`, as torch's optimizers take them.

    A parameter that is in no group is not trained.
    """
    entries = list(parameters)
    if not entries or not isinstance(entries[0], dict):
        entries = [{"params": entries}]
    options = [{k: v for k, v in entry.items() if k != "params"} for entry in entries]
    member = {
        id(parameter): index
        for index, entry in enumerate(entries)
        for parameter in _as_list(entry["params"])
    }
    return ParamGroups(options, lambda parameter: member.get(id(parameter)))


def _as_list(parameters: Any) -> list[Parameter]:
    return [parameters] if isinstance(parameters, Parameter) else list(parameters)
