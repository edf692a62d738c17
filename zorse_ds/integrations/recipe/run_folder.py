"""What lies where in a run's output folder."""

from pathlib import Path


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
