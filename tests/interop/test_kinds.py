"""Kinds of training that need other packages resume to the same loss, or say what to do. Needs the extra `interop`."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError
from tests.everyday.kinds import Training, batch, network, resume, supervised

WIDTH = 64
"""A weight of 64 × 64 elements is large enough for the packages to quantise its optimizer state."""

pytestmark = pytest.mark.filterwarnings("ignore")  # Those of the other packages are not ours to fix.


def package(name: str) -> ModuleType:
    """Return an installed module; skip the test, with the reason, if there is none."""
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install holdfast[interop]")


def wide(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH)


# ------------------------------------------------------------------------------------------------- torchao


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"])
def test_torchao_optimizers_resume_to_the_same_loss(tmp_path: Path, name: str) -> None:
    kind = getattr(package("torchao.optim"), name)

    def build() -> Training:
        model = wide()
        return supervised(model, kind(model.parameters(), lr=1e-3), WIDTH)

    with torch.compiler.set_stance("force_eager"):  # To compile the step takes ten times as long as the test.
        resume(tmp_path, build)
    names = holdfast.open_checkpoint(tmp_path / "c").tensors
    assert {"optimizer.state.weight.exp_avg.codes", "optimizer.state.weight.exp_avg_sq.scale"} <= {*names}


def test_a_torchao_optimizer_of_another_width_is_refused_by_name(tmp_path: Path) -> None:
    optim = package("torchao.optim")

    def build(kind: type[torch.optim.Optimizer]) -> Training:
        model = wide()
        return supervised(model, kind(model.parameters()), WIDTH)

    eight, four, torch_adam = build(optim.AdamW8bit), build(optim.AdamW4bit), build(torch.optim.AdamW)
    with torch.compiler.set_stance("force_eager"):
        eight.step(0)
        four.step(0)
    holdfast.save(tmp_path / "c", eight.state, process_group=False)
    with pytest.raises(InvalidError, match=r"optimizer\.state\.weight\.exp_avg: the class of this .*OptimState8bit"):
        holdfast.load(tmp_path / "c", four.state, process_group=False)
    with pytest.raises(InvalidError, match=r"OptimState8bit in the checkpoint, which AdamW does not make"):
        holdfast.load(tmp_path / "c", torch_adam.state, process_group=False)


@pytest.mark.parametrize(
    "name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_torchao_weights_are_put_together_again(tmp_path: Path, name: str) -> None:
    quantisation = package("torchao.quantization")

    def build(seed: int) -> nn.Module:
        model = nn.Sequential(wide(seed))
        quantisation.quantize_(model, getattr(quantisation, name)())
        return model

    model, other = build(0), build(1)
    holdfast.save(tmp_path / "c", {"model": model}, process_group=False)
    assert {"model.0.weight.qdata", "model.0.weight.scale"} <= {*holdfast.open_checkpoint(tmp_path / "c").tensors}
    holdfast.load(tmp_path / "c", {"model": other}, process_group=False)
    assert torch.equal(model(batch(0, WIDTH)), other(batch(0, WIDTH)))
    with pytest.raises(InvalidError, match=r"model\.0\.weight is a torchao\..* in the checkpoint and a tensor here"):
        holdfast.load(tmp_path / "c", {"model": nn.Sequential(wide())}, process_group=False)


def test_nf4_weights_are_put_together_again(tmp_path: Path) -> None:
    package("torchao")
    nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

    def build(seed: int) -> nn.Module:
        model = nn.Sequential(wide(seed))
        model[0].weight = nn.Parameter(nf4.to_nf4(model[0].weight.detach(), 32, 16), requires_grad=False)
        return model

    model, other = build(0), build(1)
    holdfast.save(tmp_path / "c", {"model": model}, process_group=False)
    holdfast.load(tmp_path / "c", {"model": other}, process_group=False)
    assert torch.equal(model[0].weight.get_original_weight(), other[0].weight.get_original_weight())


def test_float8_weights_and_their_optimizer_resume(tmp_path: Path) -> None:
    package("torchao")
    config = importlib.import_module("torchao.float8.config")
    fsdp = importlib.import_module("torchao.float8.fsdp_utils")
    linear = importlib.import_module("torchao.float8.float8_training_tensor")
    one = linear.ScaledMMConfig(False, True, False, False)

    def build(seed: int) -> dict[str, Any]:
        model = nn.Sequential(wide(seed))
        weight = fsdp.WeightWithDynamicFloat8CastTensor(
            model[0].weight.detach(), linear.LinearMMConfig(one, one, one), config.e4m3_dtype
        )
        model[0].weight = nn.Parameter(weight)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}

    def step(state: dict[str, Any]) -> torch.Tensor:
        weight = state["model"][0].weight
        weight.grad = torch.ones(WIDTH, WIDTH)
        state["optimizer"].step()
        (inner,), _ = weight.__tensor_flatten__()
        held: torch.Tensor = getattr(weight, inner)
        return held.clone()

    state = build(0)
    step(state)
    holdfast.save(tmp_path / "c", state, process_group=False)
    expected = step(state)
    again = build(1)
    again["model"][0].weight._precomputed_scale = torch.ones(())
    holdfast.load(tmp_path / "c", again, process_group=False)
    assert again["model"][0].weight._precomputed_scale is None  # It was that of the weights before the load.
    assert torch.equal(step(again), expected)


# -------------------------------------------------------------------------------------------- bitsandbytes


def test_bitsandbytes_optimizer_resumes_to_the_same_loss(tmp_path: Path) -> None:
    optim = package("bitsandbytes").optim

    def build() -> Training:
        model = wide()
        return supervised(model, optim.AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=1024), WIDTH)

    resume(tmp_path, build)


def test_8_bit_layers_of_bitsandbytes_load_before_their_first_forward(tmp_path: Path) -> None:
    layers = package("bitsandbytes").nn

    def build(seed: int) -> nn.Module:
        source = wide(seed)
        model = nn.Sequential(layers.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False))
        weight = source.weight.detach()
        model[0].weight = layers.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        model[0].bias = nn.Parameter(source.bias.detach())
        return model.to("cpu")

    model, other, used = build(0), build(1), build(2)
    expected = model(batch(0, WIDTH))
    holdfast.save(tmp_path / "c", {"model": model}, process_group=False)
    holdfast.load(tmp_path / "c", {"model": other}, process_group=False)
    assert torch.equal(other(batch(0, WIDTH)), expected)
    used(batch(0, WIDTH))
    with pytest.raises(InvalidError, match="refused its extra state"):  # As its own load_state_dict does.
        holdfast.load(tmp_path / "c", {"model": used}, process_group=False)


def test_4_bit_layers_of_bitsandbytes_are_refused_by_the_save(tmp_path: Path) -> None:
    layers = package("bitsandbytes").nn
    model = nn.Sequential(layers.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4"))
    model[0].weight = layers.Params4bit(wide().weight.detach(), requires_grad=False, quant_type="nf4")
    model = model.to("cpu")
    with pytest.raises(InvalidError, match=r"makes 0\.weight\.absmax.* which no hook or method of it loads again"):
        holdfast.save(tmp_path / "c", {"model": model}, process_group=False)
    assert not (tmp_path / "c").exists()


# --------------------------------------------------------------------------------- peft, accelerate, torchdata


def _adapted() -> tuple[nn.Module, torch.optim.Optimizer]:
    peft = package("peft")
    config = peft.LoraConfig(target_modules=["0", "3"], r=2, lora_dropout=0.0)
    model = peft.get_peft_model(network(), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


@pytest.mark.parametrize("adapter_only", [False, True])
def test_adapters_resume_to_the_same_loss(tmp_path: Path, adapter_only: bool) -> None:
    def build() -> Training:
        model, optimizer = _adapted()
        training = supervised(model, optimizer)
        adapter = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if adapter_only:
            # BatchNorm's running statistics are no parameters; without them only evaluation would differ.
            return Training({"adapter": adapter, "optimizer": optimizer}, training.step)
        return training

    resume(tmp_path, build)


def test_a_state_dict_of_adapters_does_not_name_the_optimizers_parameters(tmp_path: Path) -> None:
    model, optimizer = _adapted()
    adapter = package("peft").get_peft_model_state_dict(model)
    with pytest.raises(InvalidError, match="belongs to no module of the state, so it has no name"):
        holdfast.save(tmp_path / "c", {"adapter": adapter, "optimizer": optimizer}, process_group=False)
    holdfast.save(tmp_path / "c", {"adapter": adapter}, process_group=False)


def test_an_accelerated_optimizer_resumes_to_the_same_loss(tmp_path: Path) -> None:
    accelerator = package("accelerate").Accelerator(cpu=True)

    def build() -> Training:
        model = network()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return supervised(model, optimizer)

    resume(tmp_path, build)


def test_a_stateful_data_loader_goes_on(tmp_path: Path) -> None:
    data = package("torchdata.stateful_dataloader")
    sampling = package("torchdata.stateful_dataloader.sampler")

    def build() -> Training:
        dataset = list(range(32))
        sampler = sampling.StatefulDistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=3)
        loader = data.StatefulDataLoader(dataset, batch_size=2, sampler=sampler)
        position: list[Any] = []

        def step(number: int) -> float:
            if not position:
                position.append(iter(loader))
            return float(next(position[0]).sum())

        return Training({"loader": loader}, step)

    resume(tmp_path, build)
