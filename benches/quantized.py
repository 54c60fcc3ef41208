"""Trains by the recipes of small GPUs (quantized weights, states and products), eagerly and by
plan, and writes the table of docs/benchmarks/quantized.md.

    python benches/quantized.py [--only PART_OF_A_NAME] [--write]

Each recipe takes five steps on the CPU: eagerly twice, by plan, and by plan with 70 % of the bytes
that the plan takes inside of the step. All losses, parameters, buffers and states are compared by
their bits. It needs bitsandbytes, torchao, peft, transformers, galore-torch and apollo-torch, and a
C++ compiler for torchao's optimizers.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import roam

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "quantized.md"
BEGIN, END = "<!-- begin of the recipes -->", "<!-- end of the recipes -->"
STEPS = 5
DEPTH = 3
WIDE = range(0, 2 * DEPTH, 2)
"""The places of the wide layers of a model."""
Training = tuple[Any, Any, Callable[..., Any], Callable[[int], tuple[Any, ...]]]
"""Model, optimizer, step, and what gives the batch of a step."""
RECIPES: dict[str, Callable[[], Training]] = {}


def recipe(name: str, build: Callable[[], Training]) -> None:
    RECIPES[name] = build


# -- models and steps


def train_step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(x).float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def language_step(model: Any, optimizer: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss  # type: ignore[no-any-return]


def mlp() -> Any:
    layers = [one for _ in range(DEPTH) for one in (nn.Linear(128, 128), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(128, 16))


def rows(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(256, 128, generator=generator)
    return x, torch.randint(16, (256,), generator=generator)


def texts(number: int) -> tuple[torch.Tensor]:
    return (torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(number)),)


def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def trained(model: Any) -> list[Any]:
    return [one for one in model.parameters() if one.requires_grad]


class LoRA(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


def frozen(convert: Callable[[Any], None], *, warm: bool = False) -> Callable[[], Training]:
    """Adapters on the layers of a model, whose weights `convert` quantizes."""

    def build() -> Training:
        model = mlp()
        convert(model)
        for place in WIDE:
            model[place] = LoRA(model[place])
        if warm:
            model(rows(0)[0])
        return model, torch.optim.AdamW(trained(model), lr=1e-3), train_step, rows

    return build


def trained_as(convert: Callable[[Any], None]) -> Callable[[], Training]:
    """A model that `convert` prepares, all of it trained."""

    def build() -> Training:
        model = mlp()
        convert(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3), train_step, rows

    return build


def updated_by(make: Callable[[Any], Any]) -> Callable[[], Training]:
    def build() -> Training:
        model = mlp()
        return model, make(model.parameters()), train_step, rows

    return build


# -- bitsandbytes


def four_bits(kind: str, nested: bool, dtype: torch.dtype = torch.float32) -> Callable[[Any], None]:
    import bitsandbytes as bnb

    def convert(model: Any) -> None:
        for module in list(model.modules()):
            for name, layer in list(module.named_children()):
                if type(layer) is not nn.Linear or layer.out_features == 16 or name == "lm_head":
                    continue
                made = bnb.nn.Linear4bit(
                    layer.in_features, layer.out_features, layer.bias is not None, dtype,
                    nested, kind,
                )  # fmt: skip
                made.weight = bnb.nn.Params4bit(
                    layer.weight.detach(), False, compress_statistics=nested, quant_type=kind
                )
                made.bias = layer.bias
                setattr(module, name, made.to("cpu"))

    return convert


def eight_bits(model: Any) -> None:
    import bitsandbytes as bnb

    for place in WIDE:
        layer = model[place]
        made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, has_fp16_weights=False)
        made.load_state_dict(layer.state_dict())
        model[place] = made.to("cpu")


def qlora(method: str, convert: Callable[[Any], None], *, bits: bool) -> Callable[[], Training]:
    """A Llama with quantized weights and adapters of peft's."""

    def build() -> Training:
        import peft

        model = llama()
        convert(model)
        model.is_loaded_in_4bit = bits
        targets = ["q_proj", "v_proj", "down_proj"]
        options: dict[str, Any] = {"target_modules": targets}
        if method in ("LoRA", "DoRA", "rsLoRA", "AdaLoRA"):
            options["r"] = 4
        if method == "IA3":
            options["feedforward_modules"] = ["down_proj"]
        if method == "AdaLoRA":
            options["total_step"] = 100
        kinds = {"DoRA": ("LoraConfig", {"use_dora": True}), "rsLoRA": ("LoraConfig", {"use_rslora": True})}  # fmt: skip
        name, more = kinds.get(method, (f"{method.replace('LoRA', 'Lora')}Config", {}))
        model = peft.get_peft_model(model, getattr(peft, name)(**options, **more))
        return model, torch.optim.AdamW(trained(model), lr=1e-3), language_step, texts

    return build


def add_bitsandbytes() -> None:
    import bitsandbytes as bnb

    for kind in ("nf4", "fp4"):
        for nested in (True, False):
            nesting = ", nested" if nested else ""
            recipe(
                f"bitsandbytes Linear4bit {kind}{nesting} + LoRA", frozen(four_bits(kind, nested))
            )
    recipe("bitsandbytes Linear8bitLt + LoRA", frozen(eight_bits, warm=True))
    recipe("bitsandbytes Linear8bitLt + LoRA, before its first use", frozen(eight_bits))
    kinds = ("AdamW", "Adam8bit", "AdamW8bit", "PagedAdamW", "PagedAdamW8bit", "Lion8bit", "SGD8bit", "RMSprop8bit",
             "Adagrad8bit", "AdEMAMix8bit", "LAMB8bit")  # fmt: skip
    for name in kinds:
        more = {"momentum": 0.9} if name == "SGD8bit" else {}
        make = getattr(bnb.optim, name)
        recipe(
            f"bitsandbytes {name}",
            updated_by(lambda held, make=make, more=more: make(held, lr=1e-3, **more)),  # type: ignore[misc]
        )
    for method in ("LoRA", "DoRA", "rsLoRA", "IA3", "AdaLoRA"):
        recipe(f"peft {method} on nf4, Llama", qlora(method, four_bits("nf4", True), bits=True))


# -- torchao


def by_config(name: str, **options: Any) -> Callable[[Any], None]:
    def convert(model: Any) -> None:
        import torchao.quantization as ao

        layers = model.model.layers if hasattr(model, "model") else model
        ao.quantize_(layers, getattr(ao, name)(**options))

    return convert


def nf4(model: Any) -> None:
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    class Linear(nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.in_features, self.out_features = layer.in_features, layer.out_features
            weight = nf4_tensor.to_nf4(layer.weight.detach(), 64, 64)
            self.weight = nn.Parameter(weight, requires_grad=False)

        def forward(self, x: torch.Tensor) -> Any:
            return nf4_tensor.linear_nf4(input=x, weight=self.weight)

    for place in WIDE:
        model[place] = Linear(model[place])


def float8(kind: str) -> Callable[[Any], None]:
    def convert(model: Any) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(kind)
        convert_to_float8_training(model, config=dataclasses.replace(config, emulate=True))

    return convert


def quantized_training(name: str) -> Callable[[Any], None]:
    def convert(model: Any) -> None:
        from torchao import quantize_
        from torchao.prototype import quantized_training as found

        quantize_(model, getattr(found, name)())

    return convert


def aware(name: str, **options: Any) -> Callable[[Any], None]:
    def convert(model: Any) -> None:
        import torchao.quantization as ao
        from torchao.quantization.qat import QATConfig

        ao.quantize_(model, QATConfig(getattr(ao, name)(**options), step="prepare"))

    return convert


def add_torchao() -> None:
    import torchao.optim as optim

    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit"):
        make = getattr(optim, name)
        recipe(f"torchao {name}", updated_by(lambda held, make=make: make(held, lr=1e-3)))  # type: ignore[misc]
    int8 = by_config("Int8WeightOnlyConfig")
    recipe("torchao int8 weights + LoRA", frozen(int8))
    recipe(
        "torchao int4 weights + LoRA",
        frozen(by_config("IntxWeightOnlyConfig", weight_dtype=torch.int4)),
    )
    recipe("torchao float8 weights + LoRA", frozen(by_config("Float8WeightOnlyConfig")))
    recipe("torchao NF4 weights + LoRA", frozen(nf4))
    for kind in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        recipe(f"torchao float8 training, {kind}", trained_as(float8(kind)))
    recipe("torchao BitNet", trained_as(quantized_training("bitnet_training")))
    recipe(
        "torchao int8 mixed precision",
        trained_as(quantized_training("int8_mixed_precision_training")),
    )
    recipe(
        "torchao QAT, int8 activations, int4 weights",
        trained_as(aware("Int8DynamicActivationIntxWeightConfig", weight_dtype=torch.int4)),
    )
    recipe(
        "torchao QAT, int4 weights",
        trained_as(aware("IntxWeightOnlyConfig", weight_dtype=torch.int4)),
    )
    for method in ("LoRA", "DoRA"):
        recipe(f"peft {method} on torchao int8, Llama", qlora(method, int8, bits=False))


# -- projected gradients, and trainers


def add_others() -> None:
    def groups(held: Any) -> list[dict[str, Any]]:
        wide = [one for one in held if one.dim() == 2]
        rank = {"rank": 8, "update_proj_gap": 100, "scale": 0.25, "proj_type": "std"}
        return [{"params": wide, **rank}]

    def galore(held: Any) -> Any:
        import galore_torch

        return galore_torch.GaLoreAdamW(groups(held), lr=1e-3)

    def apollo(held: Any) -> Any:
        import apollo_torch

        more = {"proj": "random", "scale_type": "tensor"}
        return apollo_torch.APOLLOAdamW([groups(held)[0] | more], lr=1e-3)

    recipe("GaLore AdamW", updated_by(galore))
    recipe("APOLLO AdamW", updated_by(apollo))


# -- runs


def parts(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors in a nest, those inside of quantized ones too."""
    if isinstance(value, torch.Tensor):
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        if not names:
            yield path, value.detach()
        for name in names:
            yield from parts(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from parts(part, f"{path}[{key}]")


def trained_state(model: Any, optimizer: Any, losses: list[torch.Tensor]) -> dict[str, bytes]:
    held: dict[str, Any] = {"losses": torch.stack(losses), **model.state_dict()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            held[f"state {number} {place}"] = dict(optimizer.state.get(parameter, {}))
    tensors = [one for name, value in held.items() for one in parts(value, name)]
    flat = ((name, one.reshape(-1).contiguous()) for name, one in tensors)
    return {
        name: one.view(torch.uint8).numpy().tobytes() if one.numel() else b"" for name, one in flat
    }


def run(build: Callable[[], Training], compiled: dict[str, Any] | None) -> tuple[Any, Any]:
    """The state after the steps, and the compiled step if there is one."""
    torch.manual_seed(0)
    model, optimizer, step, batch = build()
    planned: Any = None if compiled is None else roam.compile(step, **compiled)
    torch.manual_seed(1)
    losses = []
    for number in range(STEPS):
        call = step if planned is None else planned if number < STEPS - 1 else planned.measured
        losses.append(call(model, optimizer, *batch(number)).detach().clone())
    return trained_state(model, optimizer, losses), planned


def outcome(expected: Any, build: Callable[[], Training], **options: Any) -> tuple[str, Any]:
    try:
        state, planned = run(build, options)
    except (roam.CaptureError, roam.ExecutionError, roam.PlanError) as error:
        return f"refused (`{error.code}`)", None
    except Exception as error:  # noqa: BLE001 - that is what the table is to show
        return f"FAILED ({type(error).__name__})", None
    return "equal" if state == expected else "DIFFERENT", planned.memory()


def row(name: str, build: Callable[[], Training]) -> str:
    start = time.monotonic()
    try:
        expected, again = run(build, None)[0], run(build, None)[0]
    except Exception as error:  # noqa: BLE001 - not roam's
        return f"| {name} | fails eagerly ({type(error).__name__}) | | | |"
    if expected != again:
        return f"| {name} | eager runs differ | | | |"
    free, memory = outcome(expected, build)
    cells, limited = ["", ""], ""
    if memory is not None:
        inside = memory.total_bytes - memory.persistent_bytes
        limit = memory.persistent_bytes + int(0.7 * inside)
        limited, _ = outcome(expected, build, memory=limit)
        figures = (memory.total_bytes, memory.measured_bytes)
        cells = [f"{(one or 0) / 2**10:,.0f}" for one in figures]
    line = f"| {name} | {free} | {' | '.join(cells)} | {limited} |"
    print(f"{line} {time.monotonic() - start:.0f} s", flush=True)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="run recipes whose names contain this")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for add in (add_bitsandbytes, add_torchao, add_others):
        add()
    wanted = {name: build for name, build in RECIPES.items() if options.only in name}
    lines = [row(name, build) for name, build in wanted.items()]
    cells = [line.split(" | ") for line in lines]
    equal = sum(cell[1] == "equal" for cell in cells)
    print(f"{equal} of {len(lines)} recipes equal")
    if options.write:
        head = (
            "| recipe | by plan | plan, KiB | measured, KiB | with 70 % |\n|---|---|---:|---:|---|"
        )
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text("\n".join([before + BEGIN, "", head, *lines, "", END]) + after)
    return int(any("DIFFERENT" in line or "FAILED" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
