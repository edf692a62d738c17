"""`zorse profile --estimate`: layer times of a GPU type that is not at hand."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from zorse_ds.core.gpus import gpu_type_named
from zorse_ds.core.model import LayerShape, llama_block
from zorse_ds.core.plan import Dtype
from zorse_ds.core.strict import listed, suggestion
from zorse_ds.cost.estimate import EstimatedTimes
from zorse_ds.errors import ProfileError

_KEYS = ("hidden", "ffn", "heads", "kv_heads", "head_dim", "matrices")
_NEEDED = ("hidden", "ffn", "heads")
_EXAMPLE = "hidden=4096,ffn=11008,heads=32"


def parse_layer(text: str) -> LayerShape:
    """A decoder block out of `hidden=4096,ffn=11008,heads=32,kv_heads=8`.

    `kv_heads` (default: all), `head_dim` (default: hidden / heads) and `matrices` (2 or 3 of the
    feed-forward part; default: 2 where it is four times as wide, as in GPT, else 3 with a gate) may
    be left out. Raises `ProfileError`.
    """
    found = dict(_entry(part) for part in text.split(","))
    missing = [key for key in _NEEDED if key not in found]
    if missing:
        raise ProfileError(f"--layer is {text!r}, without {missing[0]}; expected {_EXAMPLE}")
    hidden, ffn, heads = (found[key] for key in _NEEDED)
    kv_heads = found.get("kv_heads", heads)
    if "head_dim" not in found and hidden % heads:
        raise ProfileError(f"--layer has hidden={hidden}, which {heads} heads do not divide")
    if kv_heads > heads or heads % kv_heads:
        raise ProfileError(
            f"--layer has kv_heads={kv_heads}; expected a divisor of the {heads} heads"
        )
    matrices = found.get("matrices", 2 if ffn == 4 * hidden else 3)
    if matrices not in (2, 3):
        raise ProfileError(f"--layer has matrices={matrices}; expected 2, or 3 with a gate")
    return _shape(hidden, ffn, (heads, kv_heads, found.get("head_dim", hidden // heads)), matrices)


def _entry(part: str) -> tuple[str, int]:
    key, sign, value = (each.strip() for each in part.partition("="))
    if key not in _KEYS:
        near = suggestion(key, _KEYS)
        raise ProfileError(f"--layer has {part!r}; expected {listed(_KEYS)} with a number{near}")
    if not sign or not value.isdecimal() or int(value) < 1:
        raise ProfileError(f"--layer has {part!r}; expected a whole number from 1 after {key}=")
    return key, int(value)


def _shape(hidden: int, ffn: int, heads: tuple[int, int, int], matrices: int) -> LayerShape:
    num_heads, kv_heads, head_dim = heads
    if matrices == 3 and head_dim * num_heads == hidden:
        return llama_block(hidden, ffn, num_heads, kv_heads)
    attention = 2 * hidden * (num_heads + kv_heads) * head_dim
    # Without a gate as in GPT: biases everywhere, and norms with two vectors.
    vectors = 2 * hidden if matrices == 3 else 9 * hidden + ffn
    return LayerShape(
        role="block",
        hidden=hidden,
        num_params=attention + matrices * hidden * ffn + vectors,
        ffn=ffn,
        heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        num_ffn_matrices=2 if matrices == 2 else 3,
    )


def estimates(
    gpu_type: str, layer: LayerShape, dtype: Dtype, seq_len: int, sizes: tuple[int, ...]
) -> dict[str, Any]:
    """What is printed, as plain data. Raises `ClusterError` for a type that is not known."""
    gpu_type_named(gpu_type)
    timer = EstimatedTimes()
    used = timer.dtype_for(gpu_type, dtype)
    times = [timer(gpu_type, "block", layer, used, seq_len, size) for size in sizes]
    error = timer.error_of(gpu_type)
    return {
        "gpu_type": gpu_type,
        "dtype": used,
        "seq_len": seq_len,
        "layer": layer.model_dump(exclude_none=True, exclude={"vocab"}),
        "estimates": [
            {"micro_batch": size, **asdict(each)} for size, each in zip(sizes, times, strict=True)
        ],
        "error": {
            "median_share": round(error.median_share, 4),
            "p90_share": round(error.p90_share, 4),
            "num_times": error.num_times,
            "from": timer.error_source(gpu_type),
        },
    }


def print_estimates(found: dict[str, Any]) -> None:
    """The same for people."""
    console = Console(highlight=False)
    table = Table("micro-batch", "forward ms", "backward ms", "from", box=None, pad_edge=False)
    for each in found["estimates"]:
        forward, backward = (f"{1e3 * each[key]:.3f}" for key in ("forward_s", "backward_s"))
        table.add_row(str(each["micro_batch"]), forward, backward, each["source"])
    console.print(f"{found['gpu_type']}, {found['dtype']}, {found['seq_len']} tokens a sample")
    console.print(table)
    error = found["error"]
    console.print(
        f"Error of estimates: half of them within {100 * error['median_share']:.0f} %, nine of "
        f"ten within {100 * error['p90_share']:.0f} % ({error['from']})"
    )
