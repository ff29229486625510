"""Rotary frequencies and factors equal those of transformers for every kind of scaling, to the last bit."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from radixserve.engine.config_reader import ConfigReader
from radixserve.engine.layers.rotary import rope_table
from radixserve.engine.rope_spec import read_rope

DIM, POSITIONS = 32, 200
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 10 for i in range(DIM // 2)],
    "long_factor": [1.0 + i for i in range(DIM // 2)],
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn-own-factor": {**YARN, "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "longrope-long": {**LONGROPE, "original_max_position_embeddings": 100},
    "longrope-short": {**LONGROPE, "original_max_position_embeddings": 200},
    "longrope-own-factor": {**LONGROPE, "original_max_position_embeddings": 100, "attention_factor": 1.2},
    "partial": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 50_000.0, **SCALINGS[name]}
    # The original context of "dynamic" is what the configuration says.
    positions = 64 if name == "dynamic" else 400
    config = LlamaConfig(
        hidden_size=2 * DIM, num_attention_heads=2, max_position_embeddings=positions, rope_parameters=parameters
    )
    init = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequencies, factor = init(config, torch.device("cpu"), seq_len=POSITIONS)
    angles = torch.arange(POSITIONS)[:, None] * frequencies
    expected = torch.cat((angles.cos(), angles.sin()), dim=1) * factor

    values = {"max_position_embeddings": positions, "rope_parameters": parameters}
    rope = read_rope(ConfigReader(values, "test"), DIM, "full_attention")
    assert torch.equal(rope_table(rope, POSITIONS), expected)


def test_layers_without_positions_turn_nothing() -> None:
    table = rope_table(None, 5)
    assert torch.equal(table, torch.tensor([[1.0, 0.0]] * 5))


def test_sizing_a_model_without_memory_loads_no_symbolic_algebra() -> None:
    """``torch.arange`` does so on the device "meta", which made each start a second longer."""
    program = (
        "import sys, torch\n"
        "from radixserve.engine.layers.rotary import rope_table\n"
        "with torch.device('meta'): table = rope_table(None, 5)\n"
        "assert table.device.type == 'meta' and table.shape == (5, 2)\n"
        "assert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
