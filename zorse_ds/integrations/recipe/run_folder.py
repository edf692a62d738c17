"""What lies where in a run's output folder."""

import os
from pathlib import Path

from zorse_ds.errors import ConfigError
from zorse_ds.integrations.recipe.schema import Recipe

_OF_A_RUN = ("model", "seq_len", "adapters")
_OF_ITS_DATA = ("train", "streaming", "validation_share", "text_column")
"""Of a recipe: what a run cannot change when it goes on."""


class RunFolder:
    """The files of one run; the same names on every rank."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.recipe = self.root / "recipe.json"
        self.config = self.root / "ds_config.json"
        self.plan = self.root / "plan.json"
        self.checkpoints = self.root / "checkpoints"
        self.curves = self.root / "curves"
        self.model = self.root / "model"
        self.finished = self.root / "finished.json"
        """Written behind everything else: what came out."""

    def steps_saved(self) -> int:
        """Steps of the latest checkpoint, 0 without one."""
        latest = self.checkpoints / "latest"
        tag = latest.read_text().strip() if latest.is_file() else ""
        digits = tag.removeprefix("global_step")
        return int(digits) if digits.isdigit() else 0

    def check(self, recipe: Recipe) -> None:
        """Raise `ConfigError` for a folder that cannot be written or has another run's steps."""
        existing = next(place for place in (self.root, *self.root.parents) if place.exists())
        if not existing.is_dir():
            found = "is a file" if existing == self.root else f"lies below the file {existing}"
            raise ConfigError(f"output is {self.root}, which {found}; expected a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(
                f"output is {self.root}, but {existing} is not writable; expected a folder in "
                "which files may be written"
            )
        if self.steps_saved() and self.recipe.is_file():
            self._check_same(recipe, Recipe.load(self.recipe))

    def _check_same(self, recipe: Recipe, before: Recipe) -> None:
        pairs = [(name, getattr(recipe, name), getattr(before, name)) for name in _OF_A_RUN]
        pairs += [
            (f"data.{name}", getattr(recipe.data, name), getattr(before.data, name))
            for name in _OF_ITS_DATA
        ]
        for name, now, then in pairs:
            if now != then and _as_path(now) != _as_path(then):
                raise ConfigError(
                    f"{name} is {now!r}, but {then!r} in the run that {self.root} holds "
                    f"{self.steps_saved()} steps of; expected the same, or another output"
                )


def _as_path(value: object) -> object:
    return Path(value).expanduser().absolute() if isinstance(value, str) else value
