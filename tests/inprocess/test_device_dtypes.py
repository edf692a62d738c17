"""A dtype that a device lacks: one sentence a kind of device, with all of its ranks."""

from zorse_ds.integrations.deepspeed.precision import DeviceDtypes, device_problems

OLD = ("float32", "float16")
NEW = ("float32", "bfloat16", "float16")


def test_ranks_of_one_kind_share_a_sentence() -> None:
    a100, v100, cpu = (
        DeviceDtypes("A100", "bfloat16", NEW),
        DeviceDtypes("V100", "bfloat16", OLD),
        DeviceDtypes("cpu", "float16", ("float32",)),
    )
    assert device_problems([a100, v100, cpu, v100]) == [
        "ranks [1, 3] (V100) would compute in bfloat16, which this device lacks; expected another "
        "dtype for the group, 'float32' or 'float16'",
        "rank 2 (cpu) would compute in float16, which this device lacks; expected another dtype "
        "for the group, 'float32'",
    ]


def test_what_every_device_can_is_no_problem() -> None:
    ranks = [DeviceDtypes("A100", dtype, NEW) for dtype in NEW]
    assert device_problems([*ranks, DeviceDtypes("V100", "float16", OLD)]) == []
