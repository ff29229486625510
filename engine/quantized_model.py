"""Which matrices of a model are 8 or 4 bits wide, where the native CPU kernels do not pack them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from radixserve.configs.schema import ServeConfig
from radixserve.engine.errors import ConfigError
from radixserve.engine.layers.experts import Experts, QuantizedExperts
from radixserve.engine.layers.linear import Linear, QuantizedLinear
from radixserve.engine.model_files import ModelFiles
from radixserve.engine.model_spec import ModelSpec
from radixserve.engine.quantization import StoredQuantization
from radixserve.engine.weights import StoredTensor, expert_names
from radixserve.kernels.quantized import BLOCK, GROUPS, UNIT, Form

# Few weights that decide much: which experts a token gets, and which token comes next.
_KEPT = ("lm_head", "mlp.gate")

_FIRST_WITH_FP8 = (8, 9)  # compute capability


def check_fp8(config: ServeConfig, spec: ModelSpec, capability: tuple[int, int]) -> None:
    """Raises ``ConfigError`` where something is e4m3 that a GPU of ``capability`` does not know."""
    if capability >= _FIRST_WITH_FP8:
        return
    if config.kv_cache_dtype == "fp8":
        what, remedy = "kv_cache_dtype fp8", "leave --kv-cache-dtype away"
    elif config.quantization == "fp8":
        what, remedy = "quantization fp8", "leave --quantization away"
    elif spec.quantization is not None and spec.quantization.layout == "fp8":
        what, remedy = f"a checkpoint in {spec.quantization.description}", "use one in AWQ or GPTQ, or not quantized"
    else:
        return
    first, ours = (".".join(map(str, each)) for each in (_FIRST_WITH_FP8, capability))
    raise ConfigError(f"{what} needs a GPU of compute capability {first} or later, and this one has {ours}; {remedy}")


def check_quantization(config: ServeConfig, files: ModelFiles, spec: ModelSpec, *, is_native: bool) -> None:
    """Raises ``ConfigError`` where ``--quantization`` is not for the model or the kernels (``is_native``: a CPU's)."""
    option = config.quantization
    if option == "auto" or (spec.quantization is not None and spec.quantization.layout == option):
        return
    problem = None
    if is_native:
        problem = "does not go with the native CPU kernels, which have --cpu-weights int8 and int4"
    elif files.gguf:
        problem = "is for safetensors; GGUF files are quantized as they are"
    elif spec.quantization is not None:
        problem = f"is for checkpoints that are not quantized, and this one is in {spec.quantization.description}"
    if problem is not None:
        raise ConfigError(f"quantization {option} {problem}; leave --quantization away")


def form_of(quantization: StoredQuantization) -> Form:
    """Of the matrices of a checkpoint, without a look at them."""
    columns = quantization.group if quantization.layout != "fp8" else quantization.block and quantization.block[1]
    group = next((size for size in reversed(GROUPS) if (columns or GROUPS[-1]) % size == 0), GROUPS[0])
    if quantization.layout != "fp8":
        return Form(4, group)
    is_blocked = quantization.block is not None and group == BLOCK and quantization.block[0] % BLOCK == 0
    return Form(8, None if columns is None else group, height=BLOCK if is_blocked else 1)


def quantize_model(model: nn.Module, form: Form) -> None:
    """Give all matrices of layers room for weights of ``form``, as far as its groups fit."""
    for path, linear in _projections(model):
        if _fits(form, linear.in_features):
            model.set_submodule(path, QuantizedLinear(linear, _of_rows(form, _rows(linear))))
    for path, experts in _experts(model):
        _quantize_experts(model, path, experts, form, form)


def quantize_as_stored(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Give matrices the room that they take in a checkpoint, ``stored`` by name. Of what is merged all parts must be
    alike, and of a rank's columns all in their own order and whole groups; else they are dequantized when they are
    loaded."""
    for path, linear in _projections(model):
        parent, parts = path.rpartition(".")[0], linear.parts
        names = [f"{path}.weight"] if f"{path}.weight" in stored else [f"{parent}.{part}.weight" for part in parts]
        form = _common_form(names, stored)
        if form is None or not _fits(form, linear.in_features):
            continue
        if stored[names[0]].shape[1] == linear.in_features or not form.reordered:
            model.set_submodule(path, QuantizedLinear(linear, _of_rows(form, _rows(linear))))
    for path, experts in _experts(model):
        count = len(experts.down_proj)
        gate_up, down = (
            _common_form(expert_names(path, kind, count), stored) for kind in ("gate_up_proj", "down_proj")
        )
        if gate_up is not None and down is not None:
            _quantize_experts(model, path, experts, gate_up, down)


def _common_form(names: list[str], stored: Mapping[str, StoredTensor]) -> Form | None:
    """Of matrices that may lie in one."""
    matrices = [stored[name].matrix if name in stored else None for name in names]
    if not matrices or matrices[0] is None or not all(map(matrices[0].merges_with, matrices)):
        return None
    return matrices[0].form


def _quantize_experts(model: nn.Module, path: str, experts: Experts, gate_up: Form, down: Form) -> None:
    """Where the kernels take them: columns in their own order, which fill units, and the same bits in both stacks."""
    for form, stack in ((gate_up, experts.gate_up_proj), (down, experts.down_proj)):
        if form.reordered or stack.shape[2] % UNIT or not _fits(form, stack.shape[2]):
            return
    if gate_up.bits == down.bits:
        _, hidden_size, inner_size = experts.down_proj.shape
        forms = _of_rows(gate_up, [inner_size]), _of_rows(down, [hidden_size])
        model.set_submodule(path, QuantizedExperts(experts, *forms))


def _experts(model: nn.Module) -> list[tuple[str, Experts]]:
    return [(path, module) for path, module in model.named_modules() if isinstance(module, Experts)]


def _fits(form: Form, columns: int) -> bool:
    return columns % (form.group or 1) == 0


def _of_rows(form: Form, rows: Iterable[int]) -> Form:
    """Blocks begin at multiples of their height, so all that is merged, and is a rank's, must be whole ones."""
    return form if not any(count % form.height for count in rows) else replace(form, height=1)


def _rows(linear: Linear) -> Iterable[int]:
    return linear.parts.values() or [len(linear.weight)]


def _projections(model: nn.Module) -> list[tuple[str, Linear]]:
    modules = [(path, module) for path, module in model.named_modules() if isinstance(module, Linear)]
    return [(path, module) for path, module in modules if not path.endswith(_KEPT)]
