"""The DeepSpeed JSON: what is refused before anything starts, and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zorse_ds import Plan
from zorse_ds.errors import ConfigError, PlanError
from zorse_ds.integrations.deepspeed.config import (
    AdaptSettings,
    check_config,
    load_config,
    plan_from_config,
    settings_of,
    settled_plan,
)
from zorse_ds.integrations.deepspeed.optimizer import rebound
from zorse_ds.integrations.deepspeed.precision import gradient_wire

PLAN_DICT: dict[str, Any] = {
    "version": 1,
    "global_batch_size": 6,
    "groups": [
        {"name": "a", "gpus": [{"rank": 0, "micro_batches": [2, 4]}]},
        {"name": "b", "dtype": "float32", "gpus": [{"rank": 1, "micro_batches": [3, 3]}]},
    ],
    "stages": [{"group": "a", "layers": [0, 2]}, {"group": "b", "layers": [2, 5]}],
}
PLAN = Plan.from_dict(PLAN_DICT)
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"train_batch_size": 8}, "train_batch_size is 8, but the plan's global_batch_size is 6"),
    ({"train_batch_size": "6"}, "train_batch_size is '6'"),
    ({"train_micro_batch_size_per_gpu": 2}, "train_micro_batch_size_per_gpu is 2, but the plan"),
    ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 1, but the plan"),
    ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage is 1, but the plan says"),
    ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage is 'auto'"),
    ({"zero_optimization": True}, "zero_optimization.stage is 1"),
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device is 'cpu'",
    ),
    (
        {"pipeline": {"activation_checkpoint_interval": 1}},
        "pipeline.activation_checkpoint_interval is 1, but the plan says recompute",
    ),
    ({"pipeline": {"stages": 4}}, "pipeline.stages is 4, but the plan has 2; expected 2"),
    ({"pipeline": {"partition": "uniform"}}, "pipeline.partition is 'uniform'"),
    ({"pipeline": {"seed_layers": True}}, "pipeline.seed_layers is true"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
    ({"fp16": {"enabled": False, "auto_cast": True}}, "fp16.auto_cast is True"),
    ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states is True"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype is 'bf16'"),
    ({"communication_data_type": "fp8"}, "communication_data_type is 'fp8'"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op is 'sum'"),
    ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor is 2.0"),
    ({"prescale_gradients": True}, "prescale_gradients is True"),
    ({"sparse_gradients": True}, "sparse_gradients is True"),
    ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation is False"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size is 2"),
    ({"compile": {"deepcompile": True}}, "compile.deepcompile is True"),
    ({"gradient_clipping": -1.0}, "gradient_clipping is -1.0; expected 0 (off)"),
    ({"gradient_clipping": "auto"}, "gradient_clipping is 'auto', which nobody fills in here"),
    ({"optimizer": {"type": "Muon"}}, "optimizer.type is 'Muon', which looks at whole parameters"),
    ({"optimizer": {"type": "LBFGS"}}, "optimizer.type is 'LBFGS'"),
    ({"optimizer": {"type": "Adafactor"}}, "optimizer.type is 'Adafactor'"),
    (
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm would have no effect; expected gradient_clipping",
    ),
    (
        {"scheduler": {"type": "ReduceLROnPlateau", "params": {}}},
        "scheduler.type is 'ReduceLROnPlateau'",
    ),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast is enabled"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel is enabled"),
    ({"comms_logger": {"enabled": True}}, "comms_logger is enabled"),
    (
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        "compression_training is enabled",
    ),
    ({"zorse": {"transprot": "staged"}}, "did you mean 'transport'?"),
    ({"zorse": {"data": {"sead": 3}}}, "did you mean 'seed'?"),
    ({"zorse": {"transport": "fast"}}, "zorse.transport"),
    ({"zorse": {"timeout_s": 0}}, "zorse.timeout_s"),
    ({"zorze": {}}, "'zorze' is not a known key; did you mean 'zorse'?"),
    ({"gradient_cliping": 1.0}, "'gradient_cliping' is not a known key; did you mean 'gradient_c"),
    ({"gradient_clip": 1.0}, "did you mean 'gradient_clipping'?"),
    ({"optimzer": {"type": "SGD"}}, "did you mean 'optimizer'?"),
    ({"Optimizer": {"type": "SGD"}}, "did you mean 'optimizer'?"),
    ({"schedular": {"type": "WarmupLR"}}, "did you mean 'scheduler'?"),
    ({"bff16": {"enabled": True}}, "did you mean 'bf16'?"),
    ({7: True}, "7 is a key of the config; expected a text"),
    ({"gradient_clipping": float("nan")}, "gradient_clipping is nan; expected 0 (off)"),
    ({"gradient_clipping": float("inf")}, "gradient_clipping is inf; expected 0 (off)"),
    ({"gradient_clipping": True}, "gradient_clipping is True; expected 0 (off)"),
    ({"gradient_clipping": "1.0"}, "gradient_clipping is '1.0'; expected 0 (off)"),
    ({"gradient_clipping": None}, "gradient_clipping is None; expected 0 (off)"),
    ({"bf16": True}, 'bf16 is True; expected an object such as {"enabled": true}'),
    ({"fp16": None}, 'fp16 is None; expected an object such as {"enabled": true}'),
    ({"bf16": {"enable": True}}, "did you mean 'enabled'?"),
    ({"fp16": {"enabled": "true"}}, "fp16.enabled is 'true'; expected true or false"),
    ({"fp16": {"enabled": True, "los_scale": 8}}, "did you mean 'loss_scale'?"),
    ({"wandb": True}, "wandb is True; expected an object {...}"),
    ({"steps_per_print": 0}, "steps_per_print is 0; expected a whole number above 0"),
    ({"steps_per_print": 2.5}, "steps_per_print is 2.5"),
    ({"steps_per_print": True}, "steps_per_print is True"),
    ({"steps_per_print": "10"}, "steps_per_print is '10'"),
    ({"optimizer": "AdamW"}, "optimizer is 'AdamW'; expected an object {...}"),
    ({"optimizer": None}, "optimizer is None; expected an object {...}"),
    ({"optimizer": {"type": 3}}, "optimizer.type is 3; expected a text"),
    ({"optimizer": {"typ": "SGD"}}, "optimizer.type is missing; expected the name of a class, but"),
    ({"optimizer": {"type": "AdamWW"}}, "did you mean 'AdamW'?"),
    ({"optimizer": {"type": "sgd"}}, "did you mean 'SGD'?"),
    ({"optimizer": {"type": "Optimizer"}}, "which neither DeepSpeed nor torch.optim knows"),
    ({"optimizer": {"type": "SGD", "params": [1]}}, "optimizer.params is [1]; expected an object"),
    ({"scheduler": ["WarmupLR"]}, "scheduler is ['WarmupLR']; expected an object {...}"),
    ({"scheduler": {"type": "WarmupRL", "params": {}}}, "did you mean 'WarmupLR'?"),
    ({"scheduler": {"type": "CosineAnealingLR", "params": {}}}, "did you mean 'CosineAnnealingLR'"),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler.params is missing"),
    ({"zorse": None}, 'zorse is None; expected an object such as {"plan": "plan.json"}'),
    ({"zorse": {"plan": ""}}, "zorse.plan is ''; expected the path of a plan file, or a plan"),
    ({"zorse": {"plan": "a\0b"}}, "zorse.plan is 'a\\x00b'; expected the path of a plan file"),
    ({"zorse": {"timeout_s": 1e-5}}, "zorse.timeout_s is 1e-05; expected at least 0.001"),
    ({"zorse": {"timeout_s": 1e8}}, "zorse.timeout_s is 100000000.0; expected at most 1000000"),
    ({"zorse": {"data": {"seed": 2**64}}}, "expected at most 18446744073709551615"),
]


@pytest.mark.parametrize("config, sentence", REFUSED, ids=lambda value: str(value)[:50])
def test_a_contradiction_is_refused_in_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(ADAMW | config, PLAN)
    problems = str(caught.value).split("\n")
    assert [problem for problem in problems if sentence in problem], problems
    assert len(problems) == 1


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_config({"train_batch_size": 8, "sparse_gradients": True}, PLAN)
    assert len(str(caught.value).split("\n")) == 2


def test_another_plan_in_the_config_is_refused() -> None:
    other = PLAN_DICT | {"schedule": "gpipe"}
    with pytest.raises(ConfigError, match="differs from the plan the model was made with"):
        check_config({"zorse": {"plan": other}}, PLAN)
    check_config({"zorse": {"plan": PLAN_DICT}}, PLAN)


def test_ordinary_configs_pass() -> None:
    settings = check_config(
        {
            **ADAMW,
            "train_batch_size": 6,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}},
            "pipeline": {"stages": "auto", "partition": "best"},
            "fp16": {"enabled": False, "loss_scale": 0},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            "communication_data_type": "fp32",
            "compression_training": {"weight_quantization": {"enabled": False}},
            "tensorboard": {"enabled": True, "output_path": "runs"},
            "steps_per_print": 10,
            "zorse": {"data": {"shuffle": False}, "timeout_s": 30},
        },
        PLAN,
    )
    assert settings.timeout_s == 30
    assert not settings.data.shuffle


@pytest.mark.parametrize(
    "config",
    [
        {"source": "a", "model_name": "b", "fp32": True, "eval_micro_batch_size_per_gpu": 1},
        {"gradient_clipping": 0, "steps_per_print": 1},
        {"optimizer": {"type": "adamw", "params": {}}},
        {"optimizer": {"type": "SGD"}, "scheduler": {"type": "StepLR", "params": {"step_size": 1}}},
        {"zorse": {"data": {"seed": 2**64 - 1}, "timeout_s": 1e7}},
    ],
    ids=str,
)
def test_own_keys_and_the_ends_of_ranges_pass(config: dict[str, Any]) -> None:
    check_config(ADAMW | config, PLAN)


@pytest.mark.parametrize("config", [5, None, "", ["ds.json"]])
def test_what_is_no_config_at_all_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"the config is .*; expected the path of a DeepSpeed"):
        load_config(config)


@pytest.mark.parametrize("section", ["bf16", "bfloat16", "fp16"])
def test_a_group_may_compute_in_another_dtype_than_the_config(section: str) -> None:
    check_config(ADAMW | {section: {"enabled": True}}, PLAN)


def test_a_plan_comes_from_a_file_a_dictionary_or_not_at_all(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    config_path = tmp_path / "ds.json"
    config_path.write_text(json.dumps({"zorse": {"plan": str(tmp_path / "plan.json")}}))
    assert plan_from_config(config_path) == PLAN
    assert plan_from_config({"zorse": {"plan": PLAN_DICT}}) == PLAN
    assert plan_from_config({}) is None
    assert plan_from_config({"zorse": {"plan": "auto"}}) is None
    with pytest.raises(PlanError, match=r"zorse\.plan\.global_batch_size"):
        plan_from_config({"zorse": {"plan": PLAN_DICT | {"global_batch_size": 0}}})


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    with pytest.raises(ConfigError, match=r"ds\.json"):
        load_config(path)
    path.write_text("{'train_batch_size': 6}")
    with pytest.raises(ConfigError, match=r"ds\.json"):
        load_config(path)


def test_a_section_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="zorse"):
        settings_of({"zorse": "plan.json"})


def test_shares_adapt_when_asked_and_as_asked() -> None:
    def adapt(value: Any) -> Any:
        return settings_of({"zorse": {"adapt_shares": value}}).adapt_shares

    assert settings_of({}).adapt_shares is None and adapt(False) is None and adapt(None) is None
    assert adapt(True) == adapt({}) == AdaptSettings()
    assert adapt({"window": 9}).window == 9
    refused = [
        ("yes", r"zorse\.adapt_shares is 'yes'; expected true, false or an object"),
        ({"windows": 3}, r"zorse\.adapt_shares\.windows is not a known key.*did you mean 'window'"),
        ({"least_gain": 0}, r"zorse\.adapt_shares\.least_gain is 0; expected more than 0"),
        ({"most_moved": 1.5}, r"zorse\.adapt_shares\.most_moved is 1\.5; expected at most 1"),
    ]
    for value, sentence in refused:
        with pytest.raises(ConfigError, match=sentence):
            adapt(value)


def test_a_config_given_as_dictionary_is_left_alone() -> None:
    config = {"train_batch_size": 6}
    load_config(config)["train_batch_size"] = 7
    assert config == {"train_batch_size": 6}


def test_a_client_optimizer_must_be_fresh_and_element_wise() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="the optimizer is 'LBFGS', which looks at whole"):
        rebound(torch.optim.LBFGS([parameter]), [{"params": [parameter]}])
    used = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(3)
    used.step()
    with pytest.raises(ConfigError, match="expected a fresh one"):
        rebound(used, [{"params": [parameter]}])


def test_a_plan_of_the_environment_goes_before_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Plan.from_dict(
        PLAN_DICT
        | {"groups": PLAN_DICT["groups"][:1], "stages": [{"group": "a", "layers": [0, 5]}]}
    )
    told.save(tmp_path / "told.json")
    monkeypatch.setenv("ZORSE_PLAN", str(tmp_path / "told.json"))
    assert settled_plan(PLAN, {"zorse": {"plan": PLAN_DICT}}) == told
    check_config({"zorse": {"plan": PLAN_DICT}}, told)
    larger = [{"name": "a", "gpus": [{"rank": 0, "micro_batches": [8]}]}]
    other = Plan.from_dict(told.to_dict() | {"global_batch_size": 8, "groups": larger})
    with pytest.raises(PlanError, match="global_batch_size is 6, but the script's plan has 8"):
        settled_plan(other, None)
    monkeypatch.delenv("ZORSE_PLAN")
    assert settled_plan(PLAN, None) == PLAN
    assert settled_plan(None, None) is None


@pytest.mark.parametrize(
    ("wanted", "computed", "expected"),
    [
        (None, torch.bfloat16, torch.bfloat16),
        (None, torch.float16, torch.float16),
        (None, torch.float32, None),
        (None, torch.float64, None),
        ("fp32", torch.bfloat16, None),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.bfloat16, torch.float16),
    ],
)
def test_gradients_travel_as_in_deepspeed(
    wanted: str | None, computed: torch.dtype, expected: torch.dtype | None
) -> None:
    config = {} if wanted is None else {"communication_data_type": wanted}
    assert gradient_wire(config, computed) == expected
