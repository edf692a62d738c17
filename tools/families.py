"""Tries every family of `tools/tiny_configs.py` and writes the table in `docs/families.md`.

    python -m tools.families            # try all, write the table
    python -m tools.families mamba2     # try some, print their rows

A family is tried in float64: a tiny model with random weights, cut into three stages, against the
unsplit model of transformers. Logits and the gradients of all parameters are compared.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tools.tiny_configs import CONFIGS, REFUSED, ROUTED
from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface import CausalLMStages

TABLE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
CUT = ((0, 2), (2, 3), (3, 5))
SAME = 1e-6
"""Largest difference of logits between documents packed into a row and alone."""

HEADER = """# Families that were tried

Made by `python -m tools.families` with transformers {version} and torch {torch}, on a CPU in
float64: tiny random models of each family in three stages against the unsplit model. *Difference*
is the largest of all logits and of the gradients of all parameters; 0 means the very same bits.
*Packed documents* says whether documents that share a row stay apart when `position_ids` begin
again at each (no `attention_mask`). Families that are not listed are either understood in the same
way or refused with the reason, before weights load: `zorse doctor --model FOLDER` tells.

| configuration | model | head | balance loss | packed documents | difference |
| --- | --- | --- | --- | --- | --- |
"""

REFUSALS = """
Refused, with the reason given:

| configuration | reason |
| --- | --- |
"""


@dataclass(frozen=True)
class Facts:
    """What the configuration alone tells of a family."""

    name: str
    model: str
    tied: bool
    has_router_loss: bool
    takes_positions: bool

    @property
    def cells(self) -> list[str]:
        """The columns of the table that need no weights."""
        loss = "carried" if self.has_router_loss else ""
        return [self.name, self.model, "tied" if self.tied else "own", loss]


def facts_of(name: str, config: Callable[[], Any]) -> Facts:
    """Probe a configuration; raises `ModelError` when it is refused."""
    structure = CausalLMStages.from_config(config()).structure
    return Facts(
        name,
        structure.model_class.__name__,
        bool(structure.ties),
        name in ROUTED,
        "position_ids" in structure.accepted_inputs,
    )


def reason_for(config: Callable[[], Any]) -> str:
    """Why a configuration is refused, in the words of the error."""
    try:
        CausalLMStages.from_config(config())
    except ModelError as error:
        return str(error).partition(": ")[2].partition("; expected")[0]
    raise SystemExit("a configuration that should be refused is not")


def saved_model(config: Any, folder: Path) -> Any:
    """The unsplit model, with weights that are not their initial ones, also saved to `folder`."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    # Matrix products that are fused over experts do not know float64.
    return hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()


def difference(model: Any, stages: CausalLMStages) -> float:
    """The largest difference of logits and gradients, over a row and one with padding."""
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 5 + [0] * 2, [1] * 7])
    built = [stages.build(*layers).eval() for layers in CUT]
    worst = 0.0
    for batch in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        for module in (model, *built):
            module.zero_grad(set_to_none=True)
        expected = model(**batch, use_cache=False).logits
        found: Any = batch
        for stage in built:
            found = stage(found)
        weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
        for logits in (expected, found):
            (logits * weights).sum().backward()
        worst = max(worst, float((expected - found).abs().max()), _worst_gradient(model, built))
    return worst


def _worst_gradient(model: Any, built: list[Any]) -> float:
    sums: dict[str, torch.Tensor] = {}
    for name, parameter in (item for stage in built for item in stage.global_parameters()):
        if parameter.grad is not None:
            sums[name] = sums.get(name, torch.zeros_like(parameter)) + parameter.grad
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if sums.keys() != expected.keys():
        return float("inf")
    return max(float((sums[name] - grad).abs().max()) for name, grad in expected.items())


def keeps_documents_apart(model: Any) -> bool:
    """Whether two documents in a row give the logits that each gives alone."""
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split((4, 5), 1)]
    return float((packed - torch.cat(alone, 1)).abs().max()) < SAME


def row_of(name: str, config: Callable[[], Any]) -> str:
    """Try a family and tell its row."""
    facts = facts_of(name, config)
    plain = config()
    if facts.has_router_loss:
        plain.output_router_logits = False  # tests compare it; here only logits are
    with tempfile.TemporaryDirectory() as folder:
        model = saved_model(plain, Path(folder))
        worst = difference(model, CausalLMStages.from_folder(folder, dtype=torch.float64))
    apart = "takes no `position_ids`"
    if facts.takes_positions:
        apart = "apart" if keeps_documents_apart(model) else "**not** apart"
    return f"| {' | '.join([*facts.cells, apart, f'{worst:.0e}' if worst else '0'])} |"


def families() -> dict[str, Callable[[], Any]]:
    """All configurations that are cut, those with a router loss once."""
    return dict(sorted({**CONFIGS, **ROUTED}.items()))


def lines_of_refusals() -> Iterator[str]:
    """The rows of the second table."""
    for name, config in REFUSED.items():
        yield f"| {name} | {reason_for(config)} |"


def main(names: list[str]) -> None:
    """Print rows; without names write the table too."""
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    wanted = {name: config for name, config in families().items() if not names or name in names}
    rows = []
    for name, config in wanted.items():
        rows.append(row_of(name, config))
        print(rows[-1], flush=True)
    if not names:
        head = HEADER.format(version=hf.__version__, torch=torch.__version__.partition("+")[0])
        text = head + "\n".join(rows) + "\n" + REFUSALS + "\n".join(lines_of_refusals()) + "\n"
        TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
