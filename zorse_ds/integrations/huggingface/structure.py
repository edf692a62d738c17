"""What the probe found out about a model: which of its modules make up which pipeline layer."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from zorse_ds.errors import ModelError
from zorse_ds.integrations.huggingface.router_loss import RouterLoss


@dataclass(frozen=True)
class ModelStructure:
    """How a causal language model is laid out, as far as cutting it into stages needs.

    Pipeline layer 0 is everything before the first decoder block, layers 1 … `num_blocks` are the
    blocks, and the last layer is everything behind them. A *part* is a module with parameters that
    stands beside the list of blocks; its path is as in `named_modules()`.
    """

    model_class: type[PreTrainedModel]
    blocks_path: str
    num_blocks: int
    hidden_argument: int | str
    """Where a block finds its hidden state: a position, or the name of a keyword."""
    blocks_return_tuple: bool
    parts_before: tuple[str, ...]
    parts_after: tuple[str, ...]
    identity_parts: frozenset[str]
    """Those of `parts_before` that map hidden states to hidden states (not ids to vectors)."""
    ties: tuple[tuple[str, str], ...]
    """Pairs (parameter of the last layer, parameter of layer 0) that are one parameter."""
    accepted_inputs: frozenset[str]
    """Which of attention_mask and position_ids the model's forward takes."""
    router_loss: RouterLoss | None = None
    """The auxiliary loss of a mixture of experts, where it is switched on."""

    @property
    def num_layers(self) -> int:
        """Number of pipeline layers: the blocks and one at either end."""
        return self.num_blocks + 2

    @property
    def tied_sources(self) -> frozenset[str]:
        """Names of the parameters of layer 0 that the last layer uses too."""
        return frozenset(source for _, source in self.ties)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """One readable name per pipeline layer."""
        blocks = [f"{self.blocks_path}.{i}" for i in range(self.num_blocks)]
        return ("+".join(self.parts_before), *blocks, "+".join(self.parts_after))

    def find_layer(self, name: str) -> int | None:
        """Pipeline layer of a parameter or buffer; None for one outside blocks and parts."""
        prefix = f"{self.blocks_path}."
        if name.startswith(prefix):
            return int(name.removeprefix(prefix).partition(".")[0]) + 1
        for layer, parts in ((0, self.parts_before), (self.num_layers - 1, self.parts_after)):
            if any(name == part or name.startswith(f"{part}.") for part in parts):
                return layer
        return None

    def part_of(self, name: str) -> str:
        """Path of the part that holds the parameter `name`."""
        parts = self.parts_before + self.parts_after
        return next(part for part in parts if name.startswith(f"{part}."))

    def layer_of(self, name: str) -> int:
        """Pipeline layer index of a parameter of the unsplit model; ModelError when unknown."""
        layer = self.find_layer(name)
        if layer is None or layer >= self.num_layers:
            raise ModelError(
                f"{self.model_class.__name__} has no parameter {name!r}; expected a name as in "
                "named_parameters() of the unsplit model"
            )
        return layer

    def global_name(self, name: str) -> str:
        """The name under which a parameter is known: a tied copy goes by its source's name.

        What an adapter is wrapped around keeps the name that it had.
        """
        name = name.replace(".base_layer.", ".")
        return dict(self.ties).get(name, name)
