"""How a model is cut into equal parts, one for each rank of tensor parallelism. No torch.

Attention heads, the inner width of feed-forward networks and the vocabulary are cut; all else is the same on all ranks
(Shoeybi et al. 2019, "Megatron-LM").
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from radixserve.engine.errors import ConfigError
from radixserve.engine.model_spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model: that of ``rank`` among ``size`` ranks."""

    rank: int = 0
    size: int = 1

    def part(self, whole: int, local: int) -> slice:
        """Which of the ``whole`` entries of a dimension are the rank's, where each rank has room for ``local``.

        Where there are fewer parts than ranks (KV heads), neighbours hold the same one; where the entries cannot be
        dealt out evenly (a vocabulary), the last ranks hold fewer.
        """
        parts, rest = divmod(whole, local)
        is_shared = not rest and self.size % parts == 0
        start = self.rank * parts // self.size * local if is_shared else min(self.rank * local, whole)
        return slice(start, min(start + local, whole))


def local_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """The model that each of ``size`` ranks builds. Raises ``ConfigError`` for a model that cannot be cut so."""
    if (misfit := _misfit(spec, size)) is not None:
        fitting = next(fewer for fewer in range(size - 1, 0, -1) if _misfit(spec, fewer) is None)
        raise ConfigError(f"tensor_parallel_size {size} {misfit}; use --tensor-parallel-size {fitting}")
    return replace(
        spec,
        vocab_size=-(-spec.vocab_size // size),
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        intermediate_size=spec.intermediate_size // size,
        layers=tuple(_local_layer(layer, size) for layer in spec.layers),
    )


def _local_layer(layer: LayerSpec, size: int) -> LayerSpec:
    if layer.experts is None:
        return layer
    return replace(layer, experts=replace(layer.experts, intermediate_size=layer.experts.intermediate_size // size))


def _misfit(spec: ModelSpec, size: int) -> str | None:
    for what, count in _divided(spec):
        if count % size:
            return f"does not divide the model's {what} of {count}"
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        return f"and the model's {spec.num_kv_heads} KV heads do not divide each other"
    return None


def _divided(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    yield "number of attention heads", spec.num_heads
    for layer in spec.layers:
        if layer.experts is None:
            yield "feed-forward width", spec.intermediate_size
        else:
            yield "experts' width", layer.experts.intermediate_size
