"""``python -m radixserve.engine.probe``: what torch finds on this machine and which kernels are chosen, as JSON."""

import json

import torch

from radixserve.engine.host import usable_cores
from radixserve.engine.sizing import choose_dtype
from radixserve.kernels.interface import AttentionShape
from radixserve.kernels.select import BackendUnavailable, select_attention, select_native, select_ops

_PAGE_SIZE = 16
_MAX_SEQS = 8


def probe() -> dict[str, str]:
    """``device``, ``dtype``, ``cuda`` (what torch was built for, or ""), ``ops`` and ``attention``, the classes chosen
    for a model of common shape, or ``error``; ``slow`` where the native kernels of a CPU cannot be used. Those are
    compiled if they were not yet."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    native_bf16 = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    dtype = choose_dtype("auto", "bfloat16", device.type, native_bf16)
    found = {"device": device.type, "dtype": str(dtype).removeprefix("torch."), "cuda": torch.version.cuda or ""}
    if device.type == "cpu":
        try:
            ops = select_native(usable_cores(), lambda _: None)
            return {
                **found,
                "dtype": "packed weights",
                "ops": f"NativeOps ({ops.description})",
                "attention": "NativeAttention",
            }
        except BackendUnavailable as error:
            found["slow"] = str(error)
    try:
        attention = select_attention("auto", AttentionShape(16, 8, 128, _PAGE_SIZE, dtype), device, _MAX_SEQS)
        return {**found, "ops": type(select_ops(device, dtype)).__name__, "attention": type(attention).__name__}
    except (BackendUnavailable, ImportError, RuntimeError) as error:
        return {**found, "error": str(error)}


if __name__ == "__main__":
    print(json.dumps(probe()))
