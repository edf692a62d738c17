"""What the demo is made of: its text is deterministic, its plan and configuration agree."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.inprocess.data_tokenizer import make_tokenizer
from tests.inprocess.hf_models import CONFIGS, save_checkpoint
from zorse_ds import Plan
from zorse_ds.errors import DataError, ModelError

LAUNCH = Path(__file__).parents[2] / "launch"
SMOLLM2_PIPELINE_LAYERS = 32


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, LAUNCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_demo_plan_fits_model_and_configuration() -> None:
    plan = Plan.load(LAUNCH / "plans" / "demo.json")
    config = json.loads((LAUNCH / "ds_config.json").read_text())
    assert plan.num_layers == SMOLLM2_PIPELINE_LAYERS
    assert config["train_batch_size"] == plan.global_batch_size
    assert (LAUNCH.parent / config["zorse"]["plan"]).is_file()
    assert [gpu.micro_batches for gpu in plan.groups[0].gpus] == [(2, 2, 2, 2), (1, 1, 1, 1)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--plan", "nope"], "there is no plan 'nope'; expected one of: demo"),
        (["--steps", "0"], "--steps is '0'; expected a whole number above 0"),
        (["--stpes", "1"], "unknown argument '--stpes'"),
        (["--plan"], "--plan needs a value"),
        (["--plan", "../../x"], "--plan is '../../x'; expected the name of a file in launch/plans"),
    ],
)
def test_demo_names_mistakes(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    command = [shutil.which("bash") or "bash", str(LAUNCH / "demo.sh"), *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert sentence in result.stderr


def test_demo_help_names_its_plans() -> None:
    command = [shutil.which("bash") or "bash", str(LAUNCH / "demo.sh"), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for plan in (LAUNCH / "plans").glob("*.json"):
        assert plan.stem in text
        assert Plan.load(plan).num_layers == SMOLLM2_PIPELINE_LAYERS


@pytest.mark.parametrize("rank", [0, 2])
def test_finetune_ends_with_the_sentence(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 at once; others only when rank 0 has not ended the job meanwhile."""
    script = load_script("finetune")
    waited: list[float] = []
    heard: list[str] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        heard.append(capsys.readouterr().err)

    def fail(args: object) -> None:
        raise DataError("it is empty")

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(script, "parse_arguments", lambda: None)
    monkeypatch.setattr(script, "run", fail)
    monkeypatch.setattr(script.time, "sleep", wait)
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "it is empty\n"
    assert (waited, heard) == (([], []) if rank == 0 else ([script.OTHERS_WAIT_S], [""]))


def test_finetune_wants_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="has no tokenizer") as caught:
        load_script("finetune").load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_generate_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(CONFIGS["llama"](), tmp_path)
    make_tokenizer(eos_token="<end>").save_pretrained(tmp_path)
    monkeypatch.setattr("sys.argv", ["generate.py", str(tmp_path), "w1 w2 w3"])
    load_script("generate").main()
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_docstrings_are_found_once_with_their_signature(tmp_path: Path) -> None:
    script = load_script("prepare_docstrings")
    source = tmp_path / "sample.py"
    long = "It says enough to be worth learning from, in one line."
    source.write_text(
        f'"""{long} M"""\n'
        "class A:\n"
        f'    """{long} A\n\n    More.\n    """\n'
        f'    def f(self, x: int = 1, *rest):\n        """{long} F"""\n'
        '    def short(self):\n        """Too short."""\n'
        f'    if True:\n        async def twice(self):\n            """{long} F"""\n'
    )
    script.sysconfig = type("Paths", (), {"get_path": staticmethod(lambda _: str(tmp_path))})
    documents = script.collect([source])
    assert [(document.name, document.text) for document in documents] == [
        ("sample", f"module sample\n\n{long} M\n"),
        ("sample.A", f"class sample.A\n\n{long} A\n\nMore.\n"),
        ("sample.A.f", f"function sample.A.f(self, x: int=1, *rest)\n\n{long} F\n"),
    ]


def test_docstrings_are_written_alike_and_split_apart(tmp_path: Path) -> None:
    script = load_script("prepare_docstrings")
    documents = [script.Document(f"d{i}", f"module d{i}\n\ntext ü {i}\n") for i in range(400)]
    first = script.write(tmp_path / "first", documents)
    script.write(tmp_path / "second", documents)
    for name in ("train", "heldout"):
        files = [
            (tmp_path / folder / f"{name}.jsonl").read_bytes() for folder in ("first", "second")
        ]
        assert files[0] == files[1]
    assert first["train"] + first["heldout"] == 400
    assert 5 <= first["heldout"] <= 50
    lines = (tmp_path / "first" / "heldout.jsonl").read_text().splitlines()
    heldout = {json.loads(line)["name"] for line in lines}
    assert heldout == {document.name for document in documents if script.is_heldout(document)}


class ConstantEngine:
    """Gives each batch the mean of the labels that are targets, as the loss."""

    def eval_batch(self, iterator):
        import torch

        batch = next(iterator)
        targets = [label for sample in batch for label in sample["labels"][1:] if label != -100]
        return torch.tensor(sum(targets) / len(targets))


def test_heldout_loss_weighs_batches_by_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    script = load_script("finetune")
    monkeypatch.setattr(script.dist, "get_rank", lambda: 1)
    labels = [[9, 1, 2], [9, 3], [9, -100, 5, 6, 7]]
    dataset = datasets.Dataset.from_dict({"input_ids": labels, "labels": labels})
    batches = script.heldout_batches(dataset, 2)
    assert [len(batch) for batch in batches] == [2, 1]
    assert batches[1] == [{"input_ids": labels[2], "labels": labels[2]}]
    assert script.num_targets(batches[0]) == 3
    loss = script.heldout_loss(ConstantEngine(), dataset, 2)
    assert loss == pytest.approx((1 + 2 + 3 + 5 + 6 + 7) / 6)
